"""The seam between a deployment and whatever starts and watches its worker processes.

A worker is started from a `WorkerSpec`: plain data, among it the JSON configuration that goes to the worker's
standard input (so keys are never on a command line). The worker then speaks for itself: it sends `Ready` to the
driver's address. An engine only places, watches, stops, and keeps the last lines of the log.

Every implementation (LocalEngine, RayEngine, the fake) passes `tests/cluster/engine_contract.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shardwise.records import Record


class WorkerSpec(Record):
    """One stage worker to start."""

    name: str  # unique within the deployment, e.g. "stage-0"
    node: str  # where it should run; "" = anywhere
    config: bytes  # for `python -m shardwise.stage`, on standard input
    memory_bytes: int = 0  # reserved
    device: str = "cpu"
    prefix: tuple[str, ...] = ()  # command in front, e.g. ("ip", "netns", "exec", "nas")
    environment: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What is known of a worker process."""

    name: str
    node: str
    pid: int | None
    alive: bool
    exit_status: int | None = None  # negative: the signal
    log_tail: str = ""


class ClusterEngine(Protocol):
    """Places and watches workers.

    Promises: `start` returns at once or raises; a worker dies with the engine's process, even on SIGKILL; `stop` and
    `close` leave no process behind; statuses are true within `detect_s`.
    Fails when: a node is unknown or cannot start processes (`StageLoadFailed`).
    Called by: `deploy`, recovery, reconcile.
    """

    def start(self, spec: WorkerSpec) -> None: ...

    def stop(self, name: str, *, grace_s: float = 2.0) -> None: ...

    def status(self, name: str) -> WorkerStatus: ...

    def statuses(self) -> list[WorkerStatus]: ...

    def nodes(self) -> list[str]: ...

    def close(self) -> None: ...
