"""What a virtual home consists of, as data: hosts with their access link and CPU share, and what single links add.

A host hangs on one switch by its access link (`up` towards the switch, `down` from it). The path from `a` to `b`
is a's up link, the switch, b's down link, and whatever a `Link` between the two adds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from shardwise.bench.lab.profiles import link_preset
from shardwise.errors import UsageError
from shardwise.records import Record
from shardwise.transport.shaping import LinkShape

_NAME = re.compile(r"^[a-z][a-z0-9]{0,7}$")
MAX_HOSTS = 200


class Host(Record):
    """One machine of the virtual home.

    `speed` is how fast it computes as a share of this machine's speed (0.5: everything takes twice as long).
    `cpu_share` is a cgroup quota in cores (0.5 = half a core; 0 = no limit). `relay` forces the packet relay, so
    that delay, jitter, loss and cuts can be changed while the lab runs. `memory_bytes` limits the host's processes.
    """

    name: str
    up: LinkShape = LinkShape()
    down: LinkShape = LinkShape()
    speed: float = 1.0
    cpu_share: float = 0.0
    memory_bytes: int = 0
    relay: bool = False
    brakes: bool = False  # the speed can be changed while the lab runs

    def __post_init__(self) -> None:
        if not 0.02 <= self.speed <= 1.0:
            raise UsageError(f"speed = {self.speed}", where=f"host {self.name}", hint="0.02 to 1", field="speed")
        if self.cpu_share < 0 or self.memory_bytes < 0:
            raise UsageError("cpu_share and memory_bytes cannot be negative", where=f"host {self.name}")

    @classmethod
    def on(cls, preset: str, name: str, **others: Any) -> Host:
        """A host behind a named access link, e.g. `Host.on("ethernet_1g", "nas", speed=0.5)`."""
        found = link_preset(preset)
        return cls(name=name, up=found.up, down=found.down, **others)


class Link(Record):
    """What the path from `source` to `target` has beyond their access links (one direction)."""

    source: str
    target: str
    shape: LinkShape


def host_list(hosts: Iterable[Host | str]) -> tuple[Host, ...]:
    """Checked hosts; a bare string is a host on an unshaped link."""
    found = tuple(Host(name=host) if isinstance(host, str) else host for host in hosts)
    names = [host.name for host in found]
    if not found or len(found) > MAX_HOSTS:
        raise UsageError(f"a lab has 1 to {MAX_HOSTS} hosts, not {len(found)}", where="Lab(hosts=...)")
    for name in names:
        if not _NAME.match(name):
            raise UsageError(
                f"{name!r} is no host name", where="Lab(hosts=...)", hint="1-8 lower-case letters and digits, a letter first"
            )
        if names.count(name) > 1:
            raise UsageError(f"host {name!r} is there twice", where="Lab(hosts=...)")
    return found


def link_list(links: Sequence[Link], hosts: tuple[Host, ...]) -> tuple[Link, ...]:
    """Checked links."""
    known = {host.name for host in hosts}
    for link in links:
        for name in (link.source, link.target):
            if name not in known:
                raise UsageError(
                    f"a link names the unknown host {name!r}", where="Lab(links=...)", hint=f"known: {sorted(known)}"
                )
    return tuple(links)


def needs_relay(host: Host, links: tuple[Link, ...]) -> bool:
    """Whether the host's traffic must pass user space: anything but a rate, or a link of its own."""
    own = any(host.name in (link.source, link.target) for link in links)
    return host.relay or own or not (host.up.only_rate and host.down.only_rate)
