"""What the lab tells its relay process (`wire`): the configuration, and changes while running. Data only."""

from __future__ import annotations

from typing import Literal

from shardwise.records import Record
from shardwise.transport.shaping import LinkShape


class WireHost(Record):
    """One host. `netns` is empty for a host on the bridge."""

    name: str
    mac: str
    netns: str = ""
    up: LinkShape = LinkShape()
    down: LinkShape = LinkShape()


class WireConfig(Record):
    """Everything the wire must know at the start."""

    switch_netns: str
    trunk_device: str
    hosts: list[WireHost]
    links: list[tuple[str, str, LinkShape]] = []
    seed: int = 0
    shaped_operator: bool = False  # also what goes to and from this machine passes a host's access link
    overhead_s: float = 0.0  # what the relay itself costs a frame, taken off each delay


class WireOrder(Record):
    """A change while running: a link's shape, a host cut off or back, or a question for the counters."""

    op: Literal["link", "cut", "restore", "counters"]
    key: tuple[str, str] = ("", "")
    shape: LinkShape = LinkShape()


class SlowOrder(Record):
    """How fast the cgroup behind a freeze file may compute, as a share of full speed."""

    freeze_file: str
    speed: float
