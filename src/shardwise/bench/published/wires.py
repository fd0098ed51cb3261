"""What links of a kind do where a source does not say: one-way latency and rate by words of their description.

Figures: Wi-Fi of a home router with power saving, 3-5 ms (measured by many; 802.11 beacon wake-ups); a switch of Gigabit
Ethernet and two kernels, 0.1-0.2 ms; clouds within a zone, 30-50 us for tuned stacks; the internet between continents,
50-100 ms round trip. Stated values win. Nothing fails.
"""

from __future__ import annotations

import math

from shardwise.bench.published.rows import Wires
from shardwise.machines.profile import LinkProfile, Measurement

_GBIT = 1e9 / 8
_KINDS: tuple[tuple[tuple[str, ...], float, float, bool], ...] = (  # words, latency, bytes/s, inside one machine
    (("wi-fi", "wifi", "wireless", "wlan"), 4e-3, 0.2 * _GBIT, False),
    (("internet", "wan", "regions"), 25e-3, 0.2 * _GBIT, False),
    (("nvlink", "nvswitch"), 2e-6, 2400 * _GBIT, True),
    (("pcie", "inside one", "same host"), 10e-6, 96 * _GBIT, True),
    (("loopback", "localhost"), 15e-6, 20 * _GBIT, True),
    (("rdma", "roce", "infiniband"), 20e-6, 64 * _GBIT, False),
    (("connectx", "200gbe", "100gbe"), 50e-6, 80 * _GBIT, False),
    (("thunderbolt", "usb4"), 150e-6, 16 * _GBIT, False),
    (("vpc", "cloud", "emulated"), 30e-6, 10 * _GBIT, False),
    (("tcp", "ethernet", "gigabit", "lan", "wired", "shaped", ""), 150e-6, 1 * _GBIT, False),
)
_SLOW_START_BYTES = 64e3  # a window that an open connection keeps between messages
_SLOW_START_FROM_S = 5e-3


def link_of(wires: Wires | None) -> tuple[LinkProfile, bool]:
    """(the link, whether it lies inside one machine)."""
    kind = wires.kind if wires else "pcie"
    _, latency, rate, inside = next(entry for entry in _KINDS if any(word in kind for word in entry[0]))
    if wires is not None and wires.latency_s is not None:
        latency = wires.latency_s
    if wires is not None and wires.bytes_per_s is not None:
        rate = wires.bytes_per_s
    link = LinkProfile(source="a", target="b", bytes_per_s=Measurement(value=rate), latency_s=Measurement(value=latency))
    return link, inside


def message_s(link: LinkProfile, num_bytes: float) -> float:
    """Latency, bytes, and the rounds of TCP's slow start where the round trip is long."""
    latency = link.latency_s.value
    rounds = math.log2(1 + num_bytes / _SLOW_START_BYTES) if latency > _SLOW_START_FROM_S else 0.0
    return latency + num_bytes / link.bytes_per_s.value + 2 * latency * rounds


def collective_s(link: LinkProfile, ranks: int, num_bytes: float, sync_s: float) -> float:
    """One all-reduce: the rounds of a tree, or one round in which every rank sends to all; and its bytes.

    The cheaper of both counts (Thakur, Rabenseifner, Gropp 2005).
    """
    if ranks < 2:
        return 0.0
    latency, rate = link.latency_s.value, link.bytes_per_s.value
    tree = math.ceil(math.log2(ranks)) * (latency + sync_s) + 2 * (ranks - 1) / ranks * num_bytes / rate
    direct = latency + (ranks - 1) * (sync_s + num_bytes / rate)
    return min(tree, direct)
