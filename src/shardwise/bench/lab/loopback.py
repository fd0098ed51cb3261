"""`LoopbackLab`: the shapes of a virtual home without root, on any platform, through TCP relays on loopback.

    with LoopbackLab([Host.on("wifi_good", "desktop"), Host.on("wifi_good", "nas")]) as lab:
        address, port = lab.route("desktop", "nas", port)   # connect there instead of to the nas

Every connection from one host to another passes the sender's uplink, the receiver's downlink, and what the path between the two
adds; connections share these, as cables are shared. A host's speed is an order to its workers (`injection.slow`), because nobody
but root may take processor time away.

What it cannot do: hosts share the machine's ports and memory, only TCP that was told of the relay passes, a loss is the
stall of its retransmission, and a new connection to a host that is cut off is accepted (nothing comes through).
`Lab` has the same methods.

**Promises** every relay and process ends with `close`. **Called by** `bench`, where `lab_unavailable()`.
"""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

from shardwise.bench import injection
from shardwise.bench.lab.plan import Host, Link, host_list, link_list
from shardwise.errors import ConnectFailed, UsageError
from shardwise.transport.relay import TcpRelay
from shardwise.transport.shaping import LinkModel, LinkShape

LOCAL = "127.0.0.1"
OVERHEAD_S = 2.5e-4  # what a relay's threads and sockets add to a piece; taken off each delay that is long enough
_SPEED = struct.Struct("=d")
_CERTAIN = 0.99  # a loss like that is a cut: TCP would not get through in any test's time


class _Path:
    """One direction between two hosts: links one after the other, some of them shared with other paths."""

    def __init__(self, models: Sequence[LinkModel], lock: threading.Lock) -> None:
        self._models, self._lock = models, lock

    def deliver_stream(self, now_s: float, num_bytes: int) -> float:
        with self._lock:
            out_s = now_s
            for model in self._models:
                out_s = model.deliver_stream(out_s, num_bytes)
            return max(now_s, out_s - OVERHEAD_S)


class LoopbackLab:
    """See the module's docstring."""

    def __init__(self, hosts: Iterable[Host | str], links: Sequence[Link] = (), *, seed: int = 0) -> None:
        self._hosts = {host.name: host for host in host_list(hosts)}
        self._lock = threading.Lock()
        self._access: dict[tuple[str, str], LinkModel] = {}
        for number, host in enumerate(self._hosts.values()):
            self._access[host.name, "up"] = LinkModel(host.up, seed + 2 * number)
            self._access[host.name, "down"] = LinkModel(host.down, seed + 2 * number + 1)
        found = link_list(links, tuple(self._hosts.values()))
        self._links = {(link.source, link.target): LinkModel(link.shape, seed + 1000 + n) for n, link in enumerate(found)}
        self._relays: dict[tuple[str, str, int], TcpRelay] = {}
        self._held: set[tuple[str, str]] = set()  # (host, direction)
        self._folder = contextlib.ExitStack()
        self._speeds = Path(self._folder.enter_context(tempfile.TemporaryDirectory(prefix="shardwise-lab-")))
        for host in self._hosts.values():
            (self._speeds / host.name).write_bytes(_SPEED.pack(_speed_of(host)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every relay; may be called twice."""
        for relay in self._relays.values():
            relay.close()
        self._relays.clear()
        self._folder.close()

    # -- using it ----------------------------------------------------------------------------------------------

    def address(self, host: str) -> str:
        """Where a host's processes listen: loopback."""
        self._host(host)
        return LOCAL

    def prefix(self, host: str) -> list[str]:
        """What to put before a command: every host is this machine, but some compute slowly."""
        found = self._host(host)
        if _speed_of(found) >= 1.0 and not found.brakes:
            return []
        folder = Path(injection.__file__).parent / "slow"
        return ["env", f"PYTHONPATH={folder}", f"SHARDWISE_SPEED={self._speeds / host}"]

    def route(self, source: str, target: str, port: int) -> tuple[str, int]:
        """Where `source` connects to reach `port` of `target`."""
        self._host(source), self._host(target)
        if source == target:
            return LOCAL, port
        key = (source, target, port)
        if key not in self._relays:
            self._relays[key] = TcpRelay((LOCAL, port), forth=self._path(source, target), back=self._path(target, source))
            self._hold(key)
        return self._relays[key].address

    # -- changing it while it runs -------------------------------------------------------------------------------

    def set_access(self, host: str, *, up: LinkShape | None = None, down: LinkShape | None = None) -> None:
        """Change a host's access link. A loss that lets hardly anything through is a cut of that direction."""
        self._host(host)
        for direction, shape in (("up", up), ("down", down)):
            if shape is None:
                continue
            cut = shape.loss >= _CERTAIN
            (self._held.add if cut else self._held.discard)((host, direction))
            if not cut:
                with self._lock:
                    self._access[host, direction].shape = shape
        self._hold_all()

    def set_speed(self, host: str, speed: float) -> None:
        """Let a host's workers compute at a share of this machine's speed; 1 is full speed."""
        self._host(host)
        with open(self._speeds / host, "r+b") as file:  # in place: workers have it mapped
            file.write(_SPEED.pack(min(1.0, speed)))

    def cut(self, host: str) -> None:
        """Unplug a host."""
        self._host(host)
        self._held |= {(host, "up"), (host, "down")}
        self._hold_all()

    def restore(self, host: str) -> None:
        """Plug it in again."""
        self._host(host)
        self._held -= {(host, "up"), (host, "down")}
        self._hold_all()

    @contextlib.contextmanager
    def background(self, source: str, target: str, *, num_streams: int = 1) -> Iterator[None]:
        """A bulk transfer from one host to another while the block runs."""
        script = [sys.executable, "-m", "shardwise.bench.lab.traffic"]
        with contextlib.ExitStack() as stack:
            sink = stack.enter_context(_running([*script, "sink", LOCAL]))
            line = sink.stdout.readline().strip() if sink.stdout is not None else b""
            if not line:
                raise ConnectFailed("the receiver of the bulk transfer did not start", where="lab")
            address, port = self.route(source, target, int(line))
            for _ in range(num_streams):
                stack.enter_context(_running([*script, "pump", address, str(port)]))
            yield

    def _host(self, name: str) -> Host:
        if name not in self._hosts:
            raise UsageError(f"the lab has no host {name!r}", where="lab", hint=f"hosts: {', '.join(self._hosts)}")
        return self._hosts[name]

    def _path(self, source: str, target: str) -> _Path:
        models = [self._access[source, "up"], self._access[target, "down"]]
        if (source, target) in self._links:
            models.append(self._links[source, target])
        return _Path(models, self._lock)

    def _hold_all(self) -> None:
        for key in list(self._relays):
            self._hold(key)

    def _hold(self, key: tuple[str, str, int]) -> None:
        source, target, _ = key
        forth = bool(self._held & {(source, "up"), (target, "down")})
        back = bool(self._held & {(target, "up"), (source, "down")})
        self._relays[key].hold(forth=forth, back=back)


def _speed_of(host: Host) -> float:
    """A quota of less than a core slows a stage of one thread as much."""
    return min(host.speed, host.cpu_share or 1.0)


@contextlib.contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()
