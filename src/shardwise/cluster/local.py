"""LocalEngine: workers as child processes of this one.

**Promises** children die with their parent, even on SIGKILL (their standard input closes, and on Linux the kernel
kills them); a crash is seen at once and carries exit status and the last lines of the log. **Fails when** the
interpreter cannot be started or a declared node is not the one asked for (`StageLoadFailed`). **Called by** `deploy`,
and by the Ray actor on each node.

`prepare` starts processes ahead of their configurations, `adopt` takes some that were; a worker that is started gets one of
them if it fits.

Without declared nodes everything runs here, whatever `WorkerSpec.node` says. Virtual hosts are declared as name ->
command prefix, e.g. `LocalEngine({"nas": ("ip", "netns", "exec", "nas")})`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from shardwise.cluster.engine import NodeInfo, WorkerSpec, WorkerStatus, unknown_node, unknown_worker
from shardwise.cluster.process import WorkerProcess
from shardwise.cluster.spawn import STAGE_MODULE, Process, spawn
from shardwise.records import replace

LOCAL = "local"


class LocalEngine:
    """Workers on this machine."""

    def __init__(
        self, hosts: Mapping[str, tuple[str, ...]] | None = None, *, on_change: Callable[[], None] | None = None
    ) -> None:
        self._hosts = dict(hosts or {})
        self._on_change = on_change
        self._lock = threading.RLock()
        self._children: dict[str, WorkerProcess] = {}
        self._waiting: list[WorkerProcess] = []

    @property
    def detect_s(self) -> float:
        return 0.5

    def prepare(self, num_workers: int) -> None:
        """Have this many processes wait for a plain `start` (no command in front, no environment); 0 ends those that still do."""
        with self._lock:
            while len(self._waiting) > num_workers:
                self._waiting.pop().stop(grace_s=0.0)
            while len(self._waiting) < num_workers:
                self.adopt([spawn(f"waiting-{len(self._waiting)}")])

    def adopt(self, processes: Sequence[Process]) -> None:
        """Processes that wait like those of `prepare`; they end with this engine from now on."""
        blank = WorkerSpec(name="waiting", module=STAGE_MODULE)
        with self._lock:
            self._waiting += [WorkerProcess(blank, node=LOCAL, on_end=self._on_change, process=process) for process in processes]

    def start(self, spec: WorkerSpec) -> None:
        node = spec.node or next(iter(self._hosts), LOCAL)
        if self._hosts and node not in self._hosts:
            raise unknown_node(node, list(self._hosts), worker=spec.name)
        placed = replace(spec, prefix=(*self._hosts.get(node, ()), *spec.prefix))
        with self._lock:
            old = self._children.pop(spec.name, None)
            if old is not None:
                old.stop(grace_s=0.0)
            self._children[spec.name] = self._waiting_for(placed, node) or WorkerProcess(
                placed, node=node, on_end=self._on_change
            )

    def _waiting_for(self, spec: WorkerSpec, node: str) -> WorkerProcess | None:
        """A waiting process, now with its configuration."""
        if not self._waiting or not self._waiting[0].can_become(spec):
            return None
        child = self._waiting.pop(0)
        child.become(spec, node=node)
        return child

    def stop(self, name: str, *, grace_s: float = 2.0) -> None:
        with self._lock:
            child = self._children.pop(name, None)
        if child is not None:
            child.stop(grace_s)

    def status(self, name: str) -> WorkerStatus:
        with self._lock:
            child = self._children.get(name)
            known = list(self._children)
        if child is None:
            raise unknown_worker(name, known)
        return child.status()

    def statuses(self) -> list[WorkerStatus]:
        with self._lock:
            children = list(self._children.values())
        return [child.status() for child in children]

    def nodes(self) -> list[str]:
        return list(self._hosts) or [LOCAL]

    def node_infos(self) -> list[NodeInfo]:
        return [NodeInfo(name=name, address="" if self._hosts else "127.0.0.1") for name in self.nodes()]

    def close(self) -> None:
        """Stop all at once: their graces overlap."""
        with self._lock:
            self.prepare(0)
            children, self._children = list(self._children.values()), {}
        threads = [threading.Thread(target=child.stop, args=(2.0,), name=f"stop-{child.spec.name}") for child in children]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
