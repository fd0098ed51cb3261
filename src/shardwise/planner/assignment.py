"""The simple entry: cut layers over nodes by one figure each, without a cost model.

In: a number of layers and nodes. Out: `(node, start, end)` for every node, in the order given; ranges are half-open, follow
each other and cover every layer exactly once (`layer_wise`, `balanced`), or are the whole model for every node
(`data_parallel`, `tensor_parallel`). A node without layers has start = end. Fails with `UsageError` (a `ValueError`) for an
unknown strategy, a number of layers that is none, and memory that is negative, NaN or infinite.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, TypeVar

from shardwise.errors import NoFeasiblePlanError, UsageError
from shardwise.machines.profile import NodeProfile
from shardwise.units import format_bytes

N = TypeVar("N")

STRATEGIES = ("layer_wise", "data_parallel", "tensor_parallel", "balanced")
# Names under which a listing may tell its memory bandwidth and its compute; the unit does not matter, only proportions do.
BANDWIDTH_NAMES = (
    "memory_bandwidth_gb_s",
    "memory_bandwidth_gbs",
    "memory_bandwidth_gbps",
    "memory_bandwidth",
    "mem_bandwidth_gbps",
    "bandwidth_gb_s",
    "bandwidth_gbs",
    "bandwidth_gbps",
    "bandwidth",
)
COMPUTE_NAMES = ("compute_tflops", "tflops", "fp16_tflops", "compute", "flops")


def compute_shard_assignment(
    num_layers: int, nodes: Iterable[N], strategy: str = "layer_wise", *, layer_bytes: float | None = None
) -> list[tuple[N, int, int]]:
    """Which layers [start, end) each node holds.

    `nodes` are `NodeProfile`s, or objects with `.listing.vram_gb` (for `balanced` also `.listing` bandwidth or compute, see
    `BANDWIDTH_NAMES`, `COMPUTE_NAMES`). Strategies: `layer_wise` in proportion to memory by largest remainder (equal when
    all are 0); `balanced` in proportion to speed, no more than `layer_bytes` lets each memory hold (without it memory only
    decides who takes part); `data_parallel` and `tensor_parallel` give every node with memory the whole range.
    """
    if strategy not in STRATEGIES:
        near = difflib.get_close_matches(str(strategy), STRATEGIES, n=1)
        hint = (f"did you mean '{near[0]}'? " if near else "") + f"known: {', '.join(STRATEGIES)}"
        raise UsageError(f"unknown strategy {strategy!r}; known: {', '.join(STRATEGIES)}", where="strategy", hint=hint)
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 0:
        raise UsageError(f"num_layers = {num_layers!r} is not a number of layers", where="num_layers", hint="0 or more")
    members = list(nodes)
    memory = [_memory(node, index) for index, node in enumerate(members)]
    if not members:
        return []
    present = [m > 0 for m in memory] if any(memory) else [True] * len(members)
    if strategy in ("data_parallel", "tensor_parallel"):
        return [(node, 0, num_layers if there else 0) for node, there in zip(members, present)]
    if strategy == "layer_wise":
        counts = proportional_layers(num_layers, memory if any(memory) else [Fraction(1)] * len(members))
    else:
        counts = _balanced(num_layers, members, memory, present, layer_bytes)
    return _ranges(members, counts)


def proportional_layers(num_layers: int, weights: Sequence[Fraction]) -> list[int]:
    """Whole layers in proportion to `weights` (not all 0) by largest remainder; ties go to the earlier node."""
    total = sum(weights, Fraction(0))
    exact = [num_layers * weight / total for weight in weights]
    counts = [math.floor(e) for e in exact]
    rest = num_layers - sum(counts)
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for index in by_remainder[:rest]:
        counts[index] += 1
    return counts


def _ranges(members: Sequence[N], counts: Sequence[int]) -> list[tuple[N, int, int]]:
    out, start = [], 0
    for node, count in zip(members, counts):
        out.append((node, start, start + count))
        start += count
    return out


def _name(node: Any, index: int) -> str:
    for owner in (node, getattr(node, "listing", None)):
        for field in ("name", "node_id", "hostname", "id"):
            value = getattr(owner, field, None)
            if isinstance(value, str | int):
                return f"'{value}'"
    return f"number {index + 1}"


def _figure(value: object, what: str, node: object, index: int) -> Fraction:
    """A finite figure that is not negative, exact."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise UsageError(f"node {_name(node, index)}: {what} = {value!r} is not a number", where="nodes") from error
    if not math.isfinite(number) or number < 0:
        raise UsageError(
            f"node {_name(node, index)}: {what} = {value!r} is not allowed", where="nodes", hint="a finite number, 0 or more"
        )
    return Fraction(number)


def _memory(node: object, index: int) -> Fraction:
    if isinstance(node, NodeProfile):
        return _figure(sum(d.memory_bytes for d in node.all_devices()), "memory", node, index)
    listing: Any = getattr(node, "listing", None)
    if not hasattr(listing, "vram_gb"):
        raise UsageError(f"node {_name(node, index)} tells no memory", where="nodes", hint="NodeProfile, or .listing.vram_gb")
    return _figure(listing.vram_gb, "vram_gb", node, index)


def _memory_bytes(node: object, memory: Fraction) -> Fraction:
    return memory if isinstance(node, NodeProfile) else memory * 2**30


def _listed(names: Sequence[str]) -> Callable[[object, int], Fraction | None]:
    def read(node: object, index: int) -> Fraction | None:
        listing = getattr(node, "listing", None)
        for name in names:
            value = getattr(listing, name, None)
            if value is not None:
                return _figure(value, name, node, index)
        return None

    return read


def _speeds(members: Sequence[object], memory: Sequence[Fraction]) -> list[Fraction]:
    """Memory bandwidth where all tell it (decode is bound by it), else compute, else memory."""
    if all(isinstance(node, NodeProfile) for node in members):
        profiles = [node for node in members if isinstance(node, NodeProfile)]
        return [Fraction(max(d.memory_bytes_per_s.value for d in p.all_devices())) for p in profiles]
    for read in (_listed(BANDWIDTH_NAMES), _listed(COMPUTE_NAMES)):
        found = [read(node, index) for index, node in enumerate(members)]
        known = [value for value in found if value is not None]
        if len(known) == len(members) and any(known):
            return known
    return list(memory)


def _balanced(
    num_layers: int, members: Sequence[object], memory: Sequence[Fraction], present: Sequence[bool], layer_bytes: float | None
) -> list[int]:
    """In proportion to speed; who is full keeps what fits, the others share the rest in proportion."""
    weights = [speed if there else Fraction(0) for speed, there in zip(_speeds(members, memory), present)]
    if not any(weights):
        weights = [Fraction(1 if there else 0) for there in present]
    caps = [num_layers if there else 0 for there in present]
    if layer_bytes is not None and any(memory):
        if not math.isfinite(layer_bytes) or layer_bytes <= 0:
            raise UsageError(f"layer_bytes = {layer_bytes!r} is not allowed", where="layer_bytes", hint="above 0")
        caps = [int(_memory_bytes(node, m) // Fraction(layer_bytes)) for node, m in zip(members, memory)]
        missing = num_layers - sum(caps)
        if missing > 0:
            short = round(missing * layer_bytes)
            raise NoFeasiblePlanError(
                f"{missing} of {num_layers} layers find no place: {format_bytes(short)} short",
                where="nodes",
                rejections=[{"strategy": "balanced", "nodes": [], "reason": "memory", "short_by_bytes": short}],
            )
    counts = [0] * len(members)
    while (left := num_layers - sum(counts)) > 0:
        open_weights = [w if counts[i] < caps[i] else Fraction(0) for i, w in enumerate(weights)]
        if not any(open_weights):
            open_weights = [Fraction(1) if counts[i] < caps[i] else Fraction(0) for i in range(len(members))]
        for index, more in enumerate(proportional_layers(left, open_weights)):
            counts[index] = min(caps[index], counts[index] + more)
    return counts
