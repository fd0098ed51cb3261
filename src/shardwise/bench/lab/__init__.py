"""A virtual home on one machine: hosts, links, faults, background traffic; see `Lab`."""

from shardwise.bench.lab.home import Lab, RunningHost
from shardwise.bench.lab.loopback import LoopbackLab
from shardwise.bench.lab.plan import Host, Link
from shardwise.bench.lab.profiles import LinkPreset, link_preset, link_presets
from shardwise.bench.lab.state import clean, lab_unavailable

AnyLab = Lab | LoopbackLab

__all__ = [
    "AnyLab",
    "Host",
    "Lab",
    "Link",
    "LinkPreset",
    "LoopbackLab",
    "RunningHost",
    "clean",
    "lab_unavailable",
    "link_preset",
    "link_presets",
]
