"""Which worker is on which node, kept true by one watching thread a node. Lives in the broker process.

Specs flow in, host calls out; each change of a node or worker becomes a `Report`. **Promises** a report that shows a
command's effect precedes its answer; a lost node's workers are dead in the next report, with the reason as their log;
a node that returns takes workers again. **Fails when** a node is unknown, full or gone (`StageLoadFailed`).
**Called by** the broker.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from shardwise.clock import SystemClock
from shardwise.cluster.engine import NodeInfo, WorkerSpec, WorkerStatus, node_is_full, unknown_node
from shardwise.cluster.ray_engine.discovery import RayNode
from shardwise.cluster.ray_engine.frames import AnyFrame, Broken, FailureNote, Report
from shardwise.cluster.ray_engine.host import HostState
from shardwise.cluster.ray_engine.ray_calls import RayCalls
from shardwise.errors import NetworkError, PeerClosed, ReplyTimeout, StageLoadFailed
from shardwise.records import replace

_NODES_EVERY_S = 1.0
_STATE_EVERY_S = 1.0
_CALL_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 4.0
_GONE_AFTER_SILENT_CALLS = 4
_REFUSALS_OF_AN_ENDED_HEAD = 3


class Host:
    """A node's actor, made on first use."""

    def __init__(self, node: RayNode) -> None:
        self.node = node
        self.lock = threading.Lock()
        self.actor: Any = None
        self.lost = ""  # why, once it is


class Placement:
    """The table."""

    def __init__(self, calls: RayCalls, send: Callable[[AnyFrame], None]) -> None:
        self._calls = calls
        self._send = send
        self._clock = SystemClock()
        self._lock = threading.RLock()
        self._nodes: dict[str, RayNode] = calls.nodes()
        self._hosts: dict[str, Host] = {}  # by Ray's node id
        self._specs: dict[str, WorkerSpec] = {}
        self._places: dict[str, Host] = {}
        self._statuses: dict[str, WorkerStatus] = {}

    def watch(self) -> None:
        """Report now, and keep the list of nodes true."""
        self._report()
        threading.Thread(target=self._watch_nodes, name="nodes", daemon=True).start()
        threading.Thread(target=self._watch_head, name="head", daemon=True).start()

    def start(self, spec: WorkerSpec) -> None:
        """Place and start a worker; an older one of that name ends first."""
        self.stop(spec.name, 0.0)
        with self._lock:
            host = self._reserve(spec)
        try:
            self._ensure_actor(host)
            body = msgspec.msgpack.encode(replace(spec, node=host.node.info.name))
            failure = self._call(host, "start", body)
        except NetworkError as error:
            self._forget(spec.name)
            raise StageLoadFailed(error.message, where=host.node.info.name, hint="see 'shardwise cluster nodes'") from error
        if failure:
            self._forget(spec.name)
            raise msgspec.msgpack.decode(failure, type=FailureNote).error()
        self._refresh(host)

    def stop(self, name: str, grace_s: float) -> None:
        """End a worker, if there is one."""
        with self._lock:
            host = self._places.get(name)
        if host is not None and host.actor is not None and not host.lost:
            try:
                self._call(host, "stop", name, grace_s, timeout_s=_CALL_TIMEOUT_S + grace_s)
            except NetworkError as error:
                self._lose(host, error.message)  # and its workers with it
        self._forget(name)

    def _reserve(self, spec: WorkerSpec) -> Host:
        infos = {info.name: info for info in self._infos()}
        roomiest = max(infos.values(), key=lambda info: info.memory_bytes, default=None)
        name = spec.node or (roomiest.name if roomiest is not None else "")
        if name not in infos:
            raise unknown_node(spec.node or "any", list(infos), worker=spec.name)
        available = infos[name].memory_bytes
        if spec.memory_bytes > available:
            raise node_is_full(name, worker=spec.name, needed_bytes=spec.memory_bytes, available_bytes=available)
        node = self._nodes[name]
        host = self._hosts.get(node.node_id)
        if host is None or host.lost:
            host = self._hosts[node.node_id] = Host(node)
        self._specs[spec.name], self._places[spec.name] = spec, host
        return host

    def _infos(self) -> list[NodeInfo]:
        """Nodes with the memory that this engine has not reserved."""
        used: dict[str, int] = {}
        for name, host in self._places.items():
            status = self._statuses.get(name)
            if status is None or status.alive:
                used[host.node.node_id] = used.get(host.node.node_id, 0) + self._specs[name].memory_bytes
        return [
            replace(node.info, memory_bytes=max(0, node.info.memory_bytes - used.get(node.node_id, 0)))
            for node in self._nodes.values()
        ]

    def _ensure_actor(self, host: Host) -> None:
        with host.lock:
            if host.actor is None:
                host.actor = self._calls.make_host(host.node)
                threading.Thread(target=self._watch_host, args=(host,), name=f"host-{host.node.info.name}", daemon=True).start()

    def _call(self, host: Host, method: str, *args: Any, timeout_s: float = _CALL_TIMEOUT_S) -> Any:
        return self._calls.call(host.actor, host.node.info.name, method, *args, timeout_s=timeout_s)

    def _refresh(self, host: Host) -> None:
        try:
            self._take(host, self._call(host, "state"))
        except NetworkError as error:
            self._lose(host, error.message)

    def _take(self, host: Host, state: bytes) -> int:
        decoded = msgspec.msgpack.decode(state, type=HostState)
        with self._lock:
            for status in decoded.statuses:
                if self._places.get(status.name) is host:
                    self._statuses[status.name] = status
            self._report()
        return decoded.version

    def _lose(self, host: Host, reason: str) -> None:
        with self._lock:
            if host.lost:
                return
            host.lost = reason
            for name in [n for n, h in self._places.items() if h is host]:
                old = self._statuses.get(name) or WorkerStatus(name=name, node=host.node.info.name)
                if old.alive or old.exit_status is None:
                    tail = f"{old.log_tail}\n{reason}".strip()
                    self._statuses[name] = replace(old, alive=False, log_tail=tail, memory_bytes=0)
            self._report()

    def _forget(self, name: str) -> None:
        with self._lock:
            for table in (self._specs, self._places, self._statuses):
                table.pop(name, None)
            self._report()

    def _report(self) -> None:
        with self._lock:
            self._send(Report(nodes=tuple(self._infos()), statuses=tuple(self._statuses.values())))

    def _watch_host(self, host: Host) -> None:
        version, silent_calls = -1, 0
        while not host.lost:
            try:
                state = self._call(host, "changes", version, _STATE_EVERY_S, timeout_s=_STATE_EVERY_S + 2.0)
            except ReplyTimeout as error:
                silent_calls += 1
                if silent_calls >= _GONE_AFTER_SILENT_CALLS:
                    self._lose(host, error.message)
                continue
            except NetworkError as error:
                self._lose(host, error.message)
                return
            silent_calls = 0
            version = self._take(host, state)

    def _watch_head(self) -> None:
        """Ray itself waits for a new head that remembers us; without a database there is none, so do not wait."""
        refusals = 0
        while refusals < _REFUSALS_OF_AN_ENDED_HEAD:
            self._clock.sleep(_NODES_EVERY_S)
            refusals = refusals + 1 if self._calls.head_refuses() else 0
        with self._lock:
            hosts = [host for host in self._hosts.values() if host.actor is not None and not host.lost]
        for host in hosts:  # calls go from node to node and need no head; without this workers outlive it by 20 s
            with contextlib.suppress(NetworkError):
                self._call(host, "close", timeout_s=_CLOSE_TIMEOUT_S)
        error = PeerClosed("Ray's head has ended", where="head", hint="'shardwise cluster up' starts it again")
        self._send(Broken(failure=FailureNote.of(error)))

    def _watch_nodes(self) -> None:
        while True:
            self._clock.sleep(_NODES_EVERY_S)
            nodes = self._calls.nodes()
            with self._lock:
                if nodes == self._nodes:
                    continue
                living = {node.node_id for node in nodes.values()}
                self._nodes = nodes
                gone = [host for node_id, host in self._hosts.items() if node_id not in living]
            for host in gone:
                self._lose(host, f"node '{host.node.info.name}' left the cluster")
            self._report()
