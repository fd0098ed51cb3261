"""FakeEngine: a cluster of any size in memory, without processes. The simulator and tests place plans on it.

**Promises** the contract of `ClusterEngine` with memory reservations kept to the byte, and no time of its own: a
worker lives until `crash`, `lose_node` or `stop`. **Fails when** a node is unknown, lost or full (`StageLoadFailed`).
**Called by** `swarm`, tests of reconcile and of placement.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping

from shardwise.cluster.engine import NodeInfo, WorkerSpec, WorkerStatus, node_is_full, unknown_node, unknown_worker
from shardwise.records import replace


class FakeEngine:
    """Workers that are only written down. `nodes` is name -> memory in bytes."""

    def __init__(self, nodes: Mapping[str, int]) -> None:
        self._memory_bytes = dict(nodes)
        self._lost: set[str] = set()
        self._workers: dict[str, WorkerStatus] = {}
        self._specs: dict[str, WorkerSpec] = {}
        self._pids = itertools.count(1)
        self._lock = threading.RLock()

    @property
    def detect_s(self) -> float:
        return 0.0

    def start(self, spec: WorkerSpec) -> None:
        with self._lock:
            self._forget(spec.name)
            node = spec.node or self._roomiest()
            if node not in self.nodes():
                raise unknown_node(node, self.nodes(), worker=spec.name)
            free_bytes = self._free_bytes(node)
            if spec.memory_bytes > free_bytes:
                raise node_is_full(node, worker=spec.name, needed_bytes=spec.memory_bytes, available_bytes=free_bytes)
            self._specs[spec.name] = spec
            self._workers[spec.name] = WorkerStatus(
                name=spec.name, node=node, pid=next(self._pids), alive=True, memory_bytes=spec.memory_bytes
            )

    def stop(self, name: str, *, grace_s: float = 2.0) -> None:
        del grace_s
        with self._lock:
            self._forget(name)

    def status(self, name: str) -> WorkerStatus:
        with self._lock:
            if name not in self._workers:
                raise unknown_worker(name, list(self._workers))
            return self._workers[name]

    def statuses(self) -> list[WorkerStatus]:
        with self._lock:
            return list(self._workers.values())

    def nodes(self) -> list[str]:
        return [name for name in self._memory_bytes if name not in self._lost]

    def node_infos(self) -> list[NodeInfo]:
        with self._lock:
            return [NodeInfo(name=name, memory_bytes=self._free_bytes(name)) for name in self.nodes()]

    def close(self) -> None:
        with self._lock:
            self._workers.clear()
            self._specs.clear()

    def crash(self, name: str, exit_status: int, log_tail: str = "") -> None:
        """The worker ends by itself."""
        with self._lock:
            status = self._workers[name]
            self._workers[name] = replace(status, alive=False, exit_status=exit_status, log_tail=log_tail, memory_bytes=0)

    def lose_node(self, node: str) -> None:
        """The machine is gone and its workers with it."""
        with self._lock:
            self._lost.add(node)
            for status in [s for s in self._workers.values() if s.node == node and s.alive]:
                self._workers[status.name] = replace(
                    status, alive=False, memory_bytes=0, log_tail=f"node '{node}' does not answer"
                )

    def add_node(self, node: str, memory_bytes: int) -> None:
        """A machine joins, or comes back."""
        with self._lock:
            self._lost.discard(node)
            self._memory_bytes[node] = memory_bytes

    def _forget(self, name: str) -> None:
        self._workers.pop(name, None)
        self._specs.pop(name, None)

    def _free_bytes(self, node: str) -> int:
        used = sum(self._specs[s.name].memory_bytes for s in self._workers.values() if s.node == node and s.alive)
        return self._memory_bytes[node] - used

    def _roomiest(self) -> str:
        return max(self.nodes(), key=self._free_bytes, default="")
