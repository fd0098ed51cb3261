"""The Ray actor on each node: a `LocalEngine` behind bytes, so that workers are plain child processes everywhere.

Specs flow in and statuses out as MessagePack; Ray carries nothing else of ours. **Promises** what `LocalEngine`
promises: Ray ends the actor's process with the driver, the job or the raylet, and the workers end with the actor.
**Fails with** an encoded `FailureNote`, never an exception (nothing is unpickled on the way back). **Called by** the broker.
"""

from __future__ import annotations

import os
import threading

import msgspec

from shardwise.cluster.engine import WorkerSpec, WorkerStatus
from shardwise.cluster.local import LocalEngine
from shardwise.cluster.ray_engine.frames import FailureNote
from shardwise.errors import ShardwiseError
from shardwise.records import Record


class HostState(Record):
    """All workers of one node; `version` grows with each change."""

    version: int
    statuses: tuple[WorkerStatus, ...]


class NodeHost:
    """One per node and broker."""

    def __init__(self) -> None:
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to 1 for actors that reserve no processor
        self._changed = threading.Condition()
        self._version = 0
        self._engine = LocalEngine(on_change=self._bump)

    def start(self, spec: bytes) -> bytes:
        """Start a worker; empty bytes, or a failure."""
        try:
            self._engine.start(msgspec.msgpack.decode(spec, type=WorkerSpec))
        except ShardwiseError as error:
            return msgspec.msgpack.encode(FailureNote.of(error))
        self._bump()
        return b""

    def stop(self, name: str, grace_s: float) -> None:
        """Stop a worker, if there is one."""
        self._engine.stop(name, grace_s=grace_s)
        self._bump()

    def close(self) -> None:
        """Stop all workers."""
        self._engine.close()
        self._bump()

    def state(self) -> bytes:
        """Now."""
        with self._changed:
            version = self._version
        return msgspec.msgpack.encode(HostState(version=version, statuses=tuple(self._engine.statuses())))

    def changes(self, seen_version: int, timeout_s: float) -> bytes:
        """The state once it differs from `seen_version`, or after `timeout_s` (logs and memory move without a version)."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > seen_version, timeout=timeout_s)
        return self.state()

    def _bump(self) -> None:
        with self._changed:
            self._version += 1
            self._changed.notify_all()
