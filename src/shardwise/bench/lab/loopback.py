"""`LoopbackLab`: the shapes of a virtual home without root, on any platform, through TCP relays on loopback.

    with LoopbackLab([Host.on("wifi_good", "desktop"), Host.on("wifi_good", "nas")]) as lab:
        address, port = lab.route("desktop", "nas", port)   # connect there instead of to the nas

What it cannot do: hosts share the machine's ports and CPUs (no quota), and only TCP passes. `Lab` has the same
`route`, which there is the true address, so that callers need not care.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

from shardwise.bench.lab.plan import Host, Link, host_list, link_list
from shardwise.errors import UsageError
from shardwise.transport.relay import TcpRelay
from shardwise.transport.shaping import LinkShape


class LoopbackLab:
    """See the module's docstring. **Promises** every relay ends with `close`."""

    def __init__(self, hosts: Iterable[Host | str], links: Sequence[Link] = (), *, seed: int = 0) -> None:
        self._hosts = {host.name: host for host in host_list(hosts)}
        self._links = {(link.source, link.target): link.shape for link in link_list(links, tuple(self._hosts.values()))}
        self._seed = seed
        self._relays: dict[tuple[str, str, int], TcpRelay] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for relay in self._relays.values():
            relay.close()
        self._relays.clear()

    def address(self, host: str) -> str:
        """Where a host's processes listen: loopback."""
        self._shape(host, host)
        return "127.0.0.1"

    def prefix(self, host: str) -> list[str]:
        """Nothing: every host is this machine."""
        self._shape(host, host)
        return []

    def route(self, source: str, target: str, port: int) -> tuple[str, int]:
        """Where `source` connects to reach `port` of `target`."""
        key = (source, target, port)
        if key not in self._relays:
            self._relays[key] = TcpRelay(
                ("127.0.0.1", port),
                forth=self._shape(source, target),
                back=self._shape(target, source),
                seed=self._seed + len(self._relays),
            )
        return self._relays[key].address

    def _shape(self, source: str, target: str) -> LinkShape:
        for name in (source, target):
            if name not in self._hosts:
                raise UsageError(f"the lab has no host {name!r}", where="lab", hint=f"hosts: {', '.join(self._hosts)}")
        path = self._hosts[source].up.plus(self._hosts[target].down)
        return path.plus(self._links.get((source, target), LinkShape()))
