"""`Lab`: a virtual home network on one machine, made of network namespaces.

    with Lab(hosts=[Host.on("ethernet_1g", "desktop"), Host.on("wifi_busy", "nas", cpu_share=0.5)]) as lab:
        server = lab.popen("nas", ["python3", "-m", "http.server"])
        lab.call("desktop", ["curl", f"http://{lab.address('nas')}:8000"])

Each host is a namespace with the card `eth0`. A host whose links have only a rate hangs on a kernel bridge and is
shaped by token buckets (`tc tbf`) both ways; any other host's card is a TAP device of the relay (`wire`), which
delays, jitters, drops and cuts. The machine itself has an unshaped address in the lab, `lab.operator_address`.

To place a process of your own in a host, put `lab.prefix("nas")` before its command: it joins the host's cgroup,
enters its namespace and then *becomes* your command, so that process id, signals and pipes are your command's.

**Promises** Everything is gone after `close`, after an exception, and after SIGKILL of the owner (a guard process).
**Fails when** not root on Linux (`lab_unavailable` says why). **Called by** `bench`, tests.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from shardwise.bench.lab import system
from shardwise.bench.lab.orders import SlowOrder, WireConfig, WireHost, WireOrder
from shardwise.bench.lab.plan import Host, Link, host_list, link_list, needs_relay
from shardwise.bench.lab.state import LabState, claim, clean, lab_unavailable, tear_down
from shardwise.errors import ConnectFailed, UsageError
from shardwise.records import Record, to_json
from shardwise.transport.shaping import PAYLOAD_SHARE, LinkShape

_SWITCH = "switch"
_OPERATOR_INDEX = 254
_FRAME_BYTES = 1514
# How late a token bucket's timer may come without losing rate; what a burst of that length passes for nothing is small
# beside other delays on fast links, not on slow ones.
_TIMER_SLACK_S = 150e-6
_FAST_BYTES_PER_S, _FAST_TIMER_SLACK_S = 60e6, 500e-6
_JOIN = 'for group in $1; do echo $$ > "$group"; done; shift; exec "$@"'
RELAY_OVERHEAD_S = 60e-6  # what the relay adds to a frame beyond what a bridge would


class RunningHost(Record):
    """A host of a running lab."""

    name: str
    netns: str
    address: str
    mac: str
    relayed: bool
    cgroup_procs: tuple[str, ...] = ()
    freeze_file: str = ""


class Lab:
    """See the module's docstring. `links` adds to single paths; `seed` fixes every draw of the relay."""

    def __init__(
        self, hosts: Iterable[Host | str], links: Sequence[Link] = (), *, seed: int = 0, shaped_operator: bool = False
    ) -> None:
        """`shaped_operator`: what goes between this machine and a relayed host passes the host's access link too."""
        self._plan = host_list(hosts)
        self._links = link_list(links, self._plan)
        self._seed, self._shaped_operator = seed, shaped_operator
        self._state: LabState | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._wire: subprocess.Popen[bytes] | None = None
        self._brake: subprocess.Popen[bytes] | None = None
        self._ordering = threading.Lock()
        self._started: list[subprocess.Popen[Any]] = []
        self.hosts: dict[str, RunningHost] = {}

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- life ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Make the network; undone again if anything fails."""
        if why := lab_unavailable():
            raise UsageError(why, where="Lab", hint="run as root on Linux, or use the relays on loopback (`LoopbackLab`)")
        clean()
        self._state = claim()
        try:
            self._guard = self._module("shardwise.bench.lab.guard", str(self._state.number))
            self._make_hosts(self._state)
            self._make_wire(self._state)
            for host in self._plan:
                if host.speed < 1.0:
                    self.set_speed(host.name, host.speed)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take everything down; may be called twice."""
        if self._state is None:
            return
        state = self._state
        self._end(self._brake)
        tear_down(state)
        for process in self._started:
            _close_pipes(process)
            process.wait(timeout=10)
        self._end(self._wire)
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.write(b"done")
                self._guard.stdin.flush()
        self._end(self._guard)
        self._state, self._wire, self._brake, self._guard = None, None, None, None
        self._started.clear()
        self.hosts.clear()

    # -- using it ----------------------------------------------------------------------------------------------

    def address(self, host: str) -> str:
        """The IPv4 address of a host."""
        return self._host(host).address

    def route(self, source: str, target: str, port: int) -> tuple[str, int]:
        """Where `source` connects to reach `port` of `target`: here simply its address (see `LoopbackLab`)."""
        self._host(source)
        return self.address(target), port

    @property
    def operator_address(self) -> str:
        """The address under which the hosts see this machine (unshaped)."""
        return self._open_state().address(_OPERATOR_INDEX)

    def prefix(self, host: str) -> list[str]:
        """What to put before a command so that it runs in the host, as the same process."""
        found = self._host(host)
        enter = ["nsenter", f"--net={system.NETNS_DIR / found.netns}", "--"]
        if not found.cgroup_procs:
            return enter
        return ["sh", "-c", _JOIN, "join", " ".join(found.cgroup_procs), *enter]

    def popen(self, host: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """`subprocess.Popen` in a host; killed when the lab closes."""
        process: subprocess.Popen[Any] = subprocess.Popen([*self.prefix(host), *command], **options)
        self._started.append(process)
        return process

    def stop(self, process: subprocess.Popen[Any]) -> None:
        """End a process that `popen` started."""
        process.kill()
        process.wait(timeout=10)
        _close_pipes(process)
        if process in self._started:
            self._started.remove(process)

    def call(self, host: str, command: Sequence[str], *, timeout_s: float = 60.0, env: Mapping[str, str] | None = None) -> str:
        """Run a command in a host and return what it prints; a failure carries the end of its stderr."""
        done = subprocess.run([*self.prefix(host), *command], capture_output=True, text=True, timeout=timeout_s, env=env)
        if done.returncode:
            tail = done.stderr.strip()[-500:]
            raise ConnectFailed(f"'{command[0]}' in host {host} ended with {done.returncode}: {tail}", where="lab")
        return done.stdout

    # -- changing it while it runs -------------------------------------------------------------------------------

    def set_access(self, host: str, *, up: LinkShape | None = None, down: LinkShape | None = None) -> None:
        """Change a host's access link. A host on the bridge can only change its rate."""
        found = self._host(host)
        for direction, shape in (("up", up), ("down", down)):
            if shape is None:
                continue
            if found.relayed:
                self._order(WireOrder(op="link", key=(host, direction), shape=shape))
            elif shape.only_rate:
                self._token_bucket(found, direction, shape, "replace")
            else:
                raise UsageError(
                    f"host {host!r} hangs on the bridge and can only change its rate", hint="make it Host(relay=True)"
                )

    def set_speed(self, host: str, speed: float) -> None:
        """Let a host compute at a share of this machine's speed (`slow`); 1 is full speed."""
        found = self._host(host)
        if not found.freeze_file:
            raise UsageError(f"host {host!r} has no brakes", where="lab", hint="make it Host(brakes=True)")
        if self._brake is None:
            self._brake = self._module("shardwise.bench.lab.slow", stdout=subprocess.PIPE)
            _first_line(self._brake)
        with self._ordering:
            _send(self._brake, SlowOrder(freeze_file=found.freeze_file, speed=speed))
            _first_line(self._brake)

    def set_link(self, source: str, target: str, shape: LinkShape) -> None:
        """Change what the path between two hosts adds; one of them must have the relay."""
        if not (self._host(source).relayed or self._host(target).relayed):
            raise UsageError(f"neither {source!r} nor {target!r} has the relay", hint="make one of them Host(relay=True)")
        self._order(WireOrder(op="link", key=(source, target), shape=shape))

    def cut(self, host: str) -> None:
        """Unplug a host."""
        self._plug(host, "cut", "down")

    def restore(self, host: str) -> None:
        """Plug it in again."""
        self._plug(host, "restore", "up")

    @contextlib.contextmanager
    def background(self, source: str, target: str, *, num_streams: int = 1) -> Iterator[None]:
        """A bulk transfer from one host to another while the block runs."""
        script = [sys.executable, "-m", "shardwise.bench.lab.traffic"]
        sink = self.popen(target, [*script, "sink", self.address(target)], stdout=subprocess.PIPE)
        port = _first_line(sink)
        pumps = [self.popen(source, [*script, "pump", self.address(target), port]) for _ in range(num_streams)]
        try:
            yield
        finally:
            for process in [*pumps, sink]:
                self.stop(process)

    # -- making it -----------------------------------------------------------------------------------------------

    def _make_hosts(self, state: LabState) -> None:
        switch = state.netns(_SWITCH)
        outside = state.outside_device
        names = [state.netns(host.name) for host in self._plan]
        ip = [f"netns add {name}" for name in [switch, *names]]
        ip += [f"link add {outside} type veth peer name operator netns {switch}"]
        ip += [f"addr add {state.address(_OPERATOR_INDEX)}/24 dev {outside}", f"link set {outside} address {_mac(state, 254)} up"]
        bridge = ["link add br0 type bridge", "link set br0 up", "link set lo up", "link set operator master br0 up"]
        for index, host in enumerate(self._plan, start=1):
            relayed = needs_relay(host, self._links)
            group = state.netns(host.name)
            files = [str(file) for file in system.make_cgroup(group, host.cpu_share, host.memory_bytes)]
            freeze_file = ""
            if host.speed < 1.0 or host.brakes:
                procs, freeze_file = system.make_freezer(group)
                files = list(dict.fromkeys([*files, procs]))
            self.hosts[host.name] = RunningHost(
                name=host.name,
                netns=state.netns(host.name),
                address=state.address(index),
                mac=_mac(state, index),
                relayed=relayed,
                cgroup_procs=tuple(files),
                freeze_file=freeze_file,
            )
            if not relayed:
                bridge += [
                    f"link add port-{host.name} type veth peer name eth0 netns {state.netns(host.name)}",
                    f"link set port-{host.name} master br0 up",
                ]
        system.ip_batch(ip)
        system.ip_batch(bridge, netns=switch)
        for host in self._plan:
            running = self.hosts[host.name]
            if not running.relayed:
                self._card_up(running)
                self._token_bucket(running, "up", host.up, "add")
                self._token_bucket(running, "down", host.down, "add")

    def _make_wire(self, state: LabState) -> None:
        if not any(host.relayed for host in self.hosts.values()):
            return
        hosts = [
            WireHost(
                name=host.name,
                mac=self.hosts[host.name].mac,
                netns=self.hosts[host.name].netns if self.hosts[host.name].relayed else "",
                up=host.up,
                down=host.down,
            )
            for host in self._plan
        ]
        config = WireConfig(
            switch_netns=state.netns(_SWITCH),
            trunk_device="trunk",
            hosts=hosts,
            links=[(link.source, link.target, link.shape) for link in self._links],
            seed=self._seed,
            shaped_operator=self._shaped_operator,
            overhead_s=RELAY_OVERHEAD_S,
        )
        self._wire = self._module("shardwise.bench.lab.wire", stdout=subprocess.PIPE)
        _send(self._wire, config)
        if _first_line(self._wire) != "ready":
            raise ConnectFailed("the relay process did not start", where="lab", hint="see its message above")
        system.ip_batch(["link set trunk master br0 up"], netns=state.netns(_SWITCH))
        for host in self.hosts.values():
            if host.relayed:
                self._card_up(host)

    def _card_up(self, host: RunningHost) -> None:
        state = self._open_state()
        commands = ["link set lo up", f"link set eth0 address {host.mac} up", f"addr add {host.address}/24 dev eth0"]
        neighbours = [(other.address, other.mac) for other in self.hosts.values() if other.name != host.name]
        neighbours.append((state.address(_OPERATOR_INDEX), _mac(state, _OPERATOR_INDEX)))
        commands += [f"neigh replace {address} lladdr {mac} dev eth0 nud permanent" for address, mac in neighbours]
        system.ip_batch(commands, netns=host.netns)

    def _token_bucket(self, host: RunningHost, direction: str, shape: LinkShape, verb: str) -> None:
        netns, device = (host.netns, "eth0") if direction == "up" else (self._open_state().netns(_SWITCH), f"port-{host.name}")
        if not shape.bytes_per_s:
            system.tc(netns, "qdisc", "del", "dev", device, "root", check=False)
            return
        line_bytes_per_s = shape.bytes_per_s / PAYLOAD_SHARE
        slack_s = _FAST_TIMER_SLACK_S if line_bytes_per_s > _FAST_BYTES_PER_S else _TIMER_SLACK_S
        burst_bytes = round(_FRAME_BYTES + line_bytes_per_s * slack_s)
        rate, limit = f"{round(line_bytes_per_s * 8)}bit", str(shape.queue_limit_bytes())
        system.tc(netns, "qdisc", verb, "dev", device, "root", "tbf", "rate", rate, "burst", str(burst_bytes), "limit", limit)

    def _module(self, name: str, *args: str, **options: Any) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).resolve().parents[3])
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])))
        process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", name, *args], stdin=subprocess.PIPE, env=env, **options
        )
        return process

    def _end(self, process: subprocess.Popen[bytes] | None) -> None:
        if process is not None:
            _close_pipes(process)
            process.wait(timeout=10)

    # -- small things ----------------------------------------------------------------------------------------------

    def _plug(self, host: str, op: str, direction: str) -> None:
        found = self._host(host)
        if found.relayed:
            self._order(_plug_order(op, host))
        else:
            system.ip_batch([f"link set port-{host} {direction}"], netns=self._open_state().netns(_SWITCH))

    def _order(self, order: WireOrder) -> None:
        if self._wire is None or self._wire.poll() is not None:
            raise ConnectFailed("the relay process is gone", where="lab")
        with self._ordering:  # one order and its answer at a time, whichever thread gives it
            _send(self._wire, order)
            _first_line(self._wire)

    def _host(self, name: str) -> RunningHost:
        self._open_state()
        if name not in self.hosts:
            raise UsageError(f"the lab has no host {name!r}", where="lab", hint=f"hosts: {', '.join(self.hosts)}")
        return self.hosts[name]

    def _open_state(self) -> LabState:
        if self._state is None:
            raise UsageError("the lab is not open", where="lab", hint="use it as `with Lab(...) as lab:`")
        return self._state


def _plug_order(op: str, host: str) -> WireOrder:
    return WireOrder(op="cut" if op == "cut" else "restore", key=(host, ""))


def _mac(state: LabState, index: int) -> str:
    return f"02:73:77:{state.number:02x}:00:{index:02x}"


def _send(process: subprocess.Popen[bytes], record: Record) -> None:
    stdin: IO[bytes] | None = process.stdin
    if stdin is not None:
        stdin.write(to_json(record) + b"\n")
        stdin.flush()


def _first_line(process: subprocess.Popen[Any]) -> str:
    line = process.stdout.readline() if process.stdout is not None else b""
    return (line if isinstance(line, str) else line.decode()).strip()


def _close_pipes(process: subprocess.Popen[Any]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
