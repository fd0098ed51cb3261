"""Seconds on the links: what a boundary, a sync and a handover cost.

A message takes `overhead + latency + bytes / bandwidth` (Hockney 1994); bytes come from the tensor's shape and the
wire dtype. For throughput only `overhead + bytes / bandwidth` counts: latency delays, it does not occupy.
The article's example: 8 MB a token over 1 Gbit/s is 64 ms. Fails when a pair has no link (`UsageError`).
"""

from __future__ import annotations

import math

from shardwise.errors import UsageError
from shardwise.machines.profile import ClusterProfile, LinkProfile, Measurement
from shardwise.planner.cost_rates import RuntimeCosts
from shardwise.planner.types import WIRE_DTYPE_BYTES


def local_link(node: str, costs: RuntimeCosts) -> LinkProfile:
    """Between two stages of one machine."""
    return LinkProfile(
        source=node,
        target=node,
        bytes_per_s=Measurement(value=costs.local_bytes_per_s),
        latency_s=Measurement(value=costs.local_latency_s),
        kind="loopback",
    )


def link_between(cluster: ClusterProfile, source: str, target: str, costs: RuntimeCosts) -> LinkProfile:
    """The path from `source` to `target`; loopback within a machine, where nothing else is listed."""
    if source == target:
        for link in cluster.links:
            if link.source == source and link.target == target:
                return link
        return local_link(source, costs)
    found = cluster.link(source, target)
    if found is None:
        raise UsageError(
            f"no link from '{source}' to '{target}'",
            where="cluster",
            hint="add a [[link]] for the pair or a [defaults.link]",
        )
    return found


def message_overhead_s(link: LinkProfile, costs: RuntimeCosts) -> float:
    """Seconds a message costs beside latency; 0 extra where the latency was measured through the real transport."""
    if link.overhead_s > 0:
        return link.overhead_s
    return 0.0 if link.latency_s.n > 0 else costs.message_overhead_s


def occupancy_s(link: LinkProfile, num_bytes: float, costs: RuntimeCosts) -> float:
    """Seconds for which a message keeps the link busy: what bounds throughput."""
    return message_overhead_s(link, costs) + num_bytes / link.bytes_per_s.value


def transfer_s(link: LinkProfile, num_bytes: float, costs: RuntimeCosts) -> float:
    """Seconds from handing a message over until it has arrived."""
    return link.latency_s.value + occupancy_s(link, num_bytes, costs)


FIRST_WINDOW_BYTES = 14_600  # ten segments: what TCP sends before the first acknowledgement (RFC 6928)


def cold_start_s(link: LinkProfile, num_bytes: float) -> float:
    """Seconds that TCP's slow start adds to the first large message after a pause: a round trip each time the window doubles.

    Rounds end where the message is through, or where a window fills the link (bandwidth-delay product).
    """
    round_trip_s = 2 * link.latency_s.value
    full_bytes = max(FIRST_WINDOW_BYTES, min(num_bytes, round_trip_s * link.bytes_per_s.value))
    rounds = math.floor(math.log2(full_bytes / FIRST_WINDOW_BYTES + 1))
    return round_trip_s * rounds if num_bytes > FIRST_WINDOW_BYTES else 0.0


def activation_bytes(hidden_size: int, rows: float, wire_dtype: str, costs: RuntimeCosts) -> float:
    """Bytes of one step on a boundary: `rows * hidden_size` elements and the header."""
    return rows * hidden_size * WIRE_DTYPE_BYTES[wire_dtype] + costs.header_bytes


def token_bytes(rows: float, costs: RuntimeCosts) -> float:
    """Bytes of the way back to stage 0: a token id a row, and the header."""
    return rows * costs.token_bytes + costs.header_bytes


def all_reduce_s(links: list[LinkProfile], num_bytes: float, costs: RuntimeCosts) -> float:
    """One all-reduce of `num_bytes` over a ring of n ranks (`links` = the n hops): `2 (n-1)` rounds of `bytes / n`.

    Latency first: a token of a 32-layer model syncs 64 times. For small messages every rank sends all to all in one
    round instead (`n-1` messages, one latency); the cheaper of both counts (Thakur, Rabenseifner, Gropp 2005).
    """
    ranks = len(links)
    if ranks < 2:
        return 0.0
    ring = 2 * (ranks - 1) * max(transfer_s(link, num_bytes / ranks, costs) for link in links)
    slowest = max((ranks - 1) * occupancy_s(link, num_bytes, costs) + link.latency_s.value for link in links)
    return min(ring, slowest)


def all_to_all_s(links: list[LinkProfile], num_bytes: float, costs: RuntimeCosts) -> float:
    """Send rows to the ranks that hold their experts, or back: each rank sends `(n-1)/n` of `num_bytes`."""
    ranks = len(links)
    if ranks < 2:
        return 0.0
    return max(link.latency_s.value + (ranks - 1) * occupancy_s(link, num_bytes / ranks, costs) for link in links)


def syncs_per_token(num_layers: int) -> int:
    """All-reduces of one token under tensor parallelism: after attention and after the MLP of every layer (Megatron-LM)."""
    return 2 * num_layers
