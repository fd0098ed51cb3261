"""What a measurement run leaves behind: one versioned JSON document (`ResultFile`), comparable and self-describing.

Flow: a runner makes one `TrialResult` per (case, repetition); `store` collects them; `compare`, `gate`, `verdict` and
the report read them and nothing else. All times in seconds, all sizes in bytes. Reading fails with `UsageError` on an
unknown version or field.

`TrialResult.run` has the shape of `shardwise run --json` (the fields of `stages` and `boundaries` have its names), so
that a single run can be put into a result file as it is.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from shardwise.bench.stats import quantile
from shardwise.errors import UsageError
from shardwise.records import Record

RESULT_VERSION = 1


class Environment(Record):
    """Where and with what a run was made."""

    cpu: str
    num_cores: int
    memory_bytes: int
    kernel: str
    system: str
    python: str
    versions: dict[str, str]
    load_1min: float
    started: str  # ISO 8601 date-time, UTC
    in_virtual_home: bool = True
    lab: str = "namespaces"  # how the virtual home is made: namespaces | relays (without root)
    notes: tuple[str, ...] = ()


class Case(Record):
    """One cell of the matrix; everything that defines it."""

    network: str
    network_kind: Literal["loopback", "wired", "wireless", "wan"]
    split: str
    hosts: tuple[str, ...]  # one per stage
    workload: str
    prompt_tokens: int
    output_tokens: int
    num_users: int = 1
    layers: tuple[int, ...] = ()  # per stage; empty = equal parts
    faults: tuple[str, ...] = ()
    engine: str = "shardwise"  # or a peer's name
    model: str = "sample"
    asked_from: str = ""  # a host; empty = the first stage's

    @property
    def asking_host(self) -> str:
        return self.asked_from or self.hosts[0]

    @property
    def key(self) -> str:
        """Names the cell, for people and for resuming."""
        parts = [self.engine, self.network, self.split, self.workload, *self.faults]
        return " / ".join(parts)


class RequestResult(Record):
    """One request as its user saw it."""

    prompt_tokens: int
    num_tokens: int
    time_to_first_token_s: float
    inter_token_s: tuple[float, ...]  # every gap, in order
    finish_reason: str = "length"
    token_digest: str = ""  # SHA-256 of the token ids

    @property
    def total_s(self) -> float:
        return self.time_to_first_token_s + sum(self.inter_token_s)


class StageFigures(Record):
    """One stage over a trial; the names of `run --json`."""

    node: str
    layers: tuple[int, int]
    weight_bytes: int = 0
    kv_bytes: int = 0
    peak_memory_bytes: int = 0
    memory_limit_bytes: int = 0
    compute_s: dict[str, float] = {}
    wait_s: dict[str, float] = {}
    queue_s: dict[str, float] = {}
    pid: int = 0


class BoundaryFigures(Record):
    """One hop over a trial; the last one is the ring's way back to stage 0."""

    source: str
    target: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    bytes_per_token: float = 0.0
    transfer_s: dict[str, float] = {}
    copy_s: dict[str, float] = {}
    sync_wait_s: dict[str, float] = {}


class StageVisit(Record):
    """One stage's part of one token, on the common clock (seconds from the trial's start)."""

    stage: int
    received_s: float
    started_s: float
    computed_s: float
    sent_s: float
    copy_s: float = 0.0


class TokenTrace(Record):
    """One token's way through the stages; `arrived_s` is when the driver had it."""

    number: int
    visits: tuple[StageVisit, ...]
    arrived_s: float
    user: int = 0


class ClockOffset(Record):
    """How far a node's clock is ahead of the driver's, and how sure that is (half the shortest round trip)."""

    node: str
    offset_s: float
    error_s: float


class Recovery(Record):
    """One fault survived, or not."""

    at_token: int
    cause: str
    action: str
    stall_s: float
    fault: str = ""
    grade: str = ""


class PartSeries(Record):
    """One part of every traced token's time, in token order.

    `kind`: queue (waiting for the stage), compute, copy (out of the engine into a message, or sampling on the last
    stage), transfer (a boundary; `where` is `from>to`).
    """

    kind: Literal["queue", "compute", "copy", "transfer"]
    where: str
    seconds: tuple[float, ...]

    @property
    def p50_s(self) -> float:
        return quantile(self.seconds, 0.5)


class TrialEvent(Record):
    """Something that happened during a trial, seconds from the first request's start."""

    at_s: float
    what: str


class TrialError(Record):
    """Why a trial has no figures."""

    type: str
    message: str


class TrialResult(Record):
    """One repetition of one case."""

    case: Case
    repetition: int
    started: str
    duration_s: float
    requests: tuple[RequestResult, ...] = ()
    stages: tuple[StageFigures, ...] = ()
    boundaries: tuple[BoundaryFigures, ...] = ()
    tokens: tuple[TokenTrace, ...] = ()
    parts: tuple[PartSeries, ...] = ()
    parts_measured_s: float = 0.0  # the user's mean time between the very tokens that `parts` is about
    clock_offsets: tuple[ClockOffset, ...] = ()
    recoveries: tuple[Recovery, ...] = ()
    events: tuple[TrialEvent, ...] = ()
    predicted: dict[str, Any] = {}
    error: TrialError | None = None
    load_1min: float = 0.0
    machine_s: float = 0.0  # what a fixed piece of computing took beside the trial: how busy the machine was

    @property
    def gaps_s(self) -> list[float]:
        """Every inter-token gap of every request."""
        return [gap for request in self.requests for gap in request.inter_token_s]

    @property
    def metrics(self) -> dict[str, float]:
        """The figures that are compared: `METRICS`; empty after an error."""
        gaps = self.gaps_s
        if self.error is not None or not self.requests:
            return {}
        wall_s = max(request.total_s for request in self.requests)
        num_tokens = sum(request.num_tokens for request in self.requests)
        found = {
            "time_to_first_token_s": quantile([request.time_to_first_token_s for request in self.requests], 0.5),
            "aggregate_tokens_per_s": num_tokens / wall_s if wall_s else 0.0,
        }
        if gaps:
            found |= {
                "inter_token_p50_s": quantile(gaps, 0.5),
                "inter_token_p95_s": quantile(gaps, 0.95),
                "inter_token_p99_s": quantile(gaps, 0.99),
                "decode_tokens_per_s": len(gaps) / sum(gaps) if sum(gaps) else 0.0,
            }
        return found


class Metric(Record):
    """A figure that can be compared. `better` says which way is good."""

    name: str
    title: str
    unit: str
    better: Literal["lower", "higher"]


METRICS = (
    Metric(name="time_to_first_token_s", title="Time to first token", unit="s", better="lower"),
    Metric(name="inter_token_p50_s", title="Time between tokens, median", unit="s", better="lower"),
    Metric(name="inter_token_p95_s", title="Time between tokens, p95", unit="s", better="lower"),
    Metric(name="inter_token_p99_s", title="Time between tokens, p99", unit="s", better="lower"),
    Metric(name="decode_tokens_per_s", title="Tokens per second, one user", unit="tokens/s", better="higher"),
    Metric(name="aggregate_tokens_per_s", title="Tokens per second, all users", unit="tokens/s", better="higher"),
)


class ResultFile(Record):
    """One run of one scenario."""

    version: int
    name: str
    title: str
    scenario_digest: str
    seed: int
    environment: Environment
    trials: tuple[TrialResult, ...]
    target_inter_token_p95_s: float = 0.2
    targets: dict[str, float] = {}
    complete: bool = True

    def cases(self) -> dict[str, list[TrialResult]]:
        """Trials by case key, repetitions in order."""
        found: dict[str, list[TrialResult]] = {}
        for trial in sorted(self.trials, key=lambda trial: trial.repetition):
            found.setdefault(trial.case.key, []).append(trial)
        return found

    def samples(self, key: str, metric: str) -> list[float]:
        """One figure of every good repetition of a case."""
        return [trial.metrics[metric] for trial in self.cases().get(key, []) if metric in trial.metrics]


def read_result(data: bytes, *, where: str = "") -> ResultFile:
    """A result file; `UsageError` when it is something else or of another version."""
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version != RESULT_VERSION:
            hint = f"this program reads version {RESULT_VERSION}"
            raise UsageError(f"a result file of version {version}", where=where, hint=hint, field="version")
        return msgspec.json.decode(data, type=ResultFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"not a result file: {error}", where=where, hint="results are written by 'shardwise bench'") from error


class _Version(msgspec.Struct):
    version: int
