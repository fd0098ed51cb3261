"""The seam between a deployment and whatever starts and watches its worker processes.

A worker is started from a `WorkerSpec`: plain data, among it the JSON configuration that goes to the worker's
standard input (so keys are never on a command line). The worker then speaks for itself: it sends `Ready` to the
driver's address. An engine only places, watches, stops, and keeps the last lines of the log.

Every implementation (LocalEngine, RayEngine, FakeEngine) passes `tests/cluster/engine_contract.py`.
"""

from __future__ import annotations

from typing import Protocol

from shardwise.cluster.scheduling import UNKNOWN, Scheduling
from shardwise.cluster.spawn import STAGE_MODULE
from shardwise.errors import StageLoadFailed, UsageError
from shardwise.records import Record

ANYWHERE = ""
LOG_LINES = 60  # of a worker's standard error that an engine keeps
LOG_LINE_CHARS = 2000


class WorkerSpec(Record):
    """One worker to start. `module` is run as `python -m MODULE` and must end when its standard input ends."""

    name: str  # unique within the deployment, e.g. "stage-0"
    node: str = ANYWHERE  # where it should run
    config: bytes = b""  # on standard input, after its length in 8 bytes, little-endian
    memory_bytes: int = 0  # reserved
    device: str = "cpu"
    prefix: tuple[str, ...] = ()  # command in front, e.g. ("ip", "netns", "exec", "nas")
    environment: dict[str, str] = {}
    module: str = STAGE_MODULE


class WorkerStatus(Record):
    """What is known of a worker process."""

    name: str
    node: str
    pid: int | None = None
    alive: bool = False
    exit_status: int | None = None  # negative: the signal; None of a dead worker: its node is gone with the answer
    log_tail: str = ""
    memory_bytes: int = 0  # resident
    scheduling: Scheduling = UNKNOWN  # at most a quarter of a second old on the worker's own machine


class NodeInfo(Record):
    """A machine on which an engine can start workers."""

    name: str
    address: str = ""  # where its workers listen: IPv4 or IPv6, without port
    identity: str = ""  # the fingerprint of its key; survives a new name or address
    memory_bytes: int = 0  # that may still be reserved; 0 = unknown


class ClusterEngine(Protocol):
    """Places and watches workers.

    Promises: `start` returns at once or raises; a second `start` of a name replaces the first; a worker dies with the
    engine's process, even on SIGKILL; `stop` and `close` leave no process behind and may be called twice; statuses are
    true within `detect_s`; may be called from several threads.
    Fails when: a node is unknown, full or cannot start processes (`StageLoadFailed`); a name is unknown to `status`
    (`UsageError`).
    Called by: `deploy`, recovery, reconcile.
    """

    @property
    def detect_s(self) -> float: ...

    def start(self, spec: WorkerSpec) -> None: ...

    def stop(self, name: str, *, grace_s: float = 2.0) -> None: ...

    def status(self, name: str) -> WorkerStatus: ...

    def statuses(self) -> list[WorkerStatus]: ...

    def nodes(self) -> list[str]: ...

    def node_infos(self) -> list[NodeInfo]: ...

    def close(self) -> None: ...


def unknown_worker(name: str, known: list[str]) -> UsageError:
    """The error of `status` for a name that was never started or was stopped."""
    return UsageError(f"no worker '{name}'", hint=f"there are: {', '.join(sorted(known)) or 'none'}")


def unknown_node(name: str, known: list[str], *, worker: str) -> StageLoadFailed:
    """The error of `start` for a node that is not there."""
    return StageLoadFailed(
        f"no node '{name}' for worker {worker}",
        where="cluster",
        hint=f"nodes that are up: {', '.join(sorted(known)) or 'none'}; see 'shardwise cluster nodes'",
    )


def node_is_full(name: str, *, worker: str, needed_bytes: int, available_bytes: int) -> StageLoadFailed:
    """The error of `start` where the reservation does not fit."""
    return StageLoadFailed(
        f"node '{name}' has {available_bytes} of the {needed_bytes} bytes that {worker} reserves",
        where=name,
        hint="plan again with the memory that is left",
        needed_bytes=needed_bytes,
        available_bytes=available_bytes,
    )
