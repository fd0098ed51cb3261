"""The words in which planning is asked for and answered.

A `PlanRequest` (model, machines, workload, objective, limits) goes in; a `Plan` with its `Prediction`, alternatives,
rejections and `Advice` comes out. All are frozen records: data only, nothing here can fail but construction.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shardwise.machines.profile import ClusterProfile
from shardwise.model.description import ModelDescription
from shardwise.records import Record

# Bytes per element of an activation on the wire. q8 carries one f16 scale per 32 values.
WIRE_DTYPE_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8": 34 / 32}

STRATEGIES = (
    "single_node",
    "layer_wise",
    "tensor_parallel",
    "data_parallel",
    "expert_parallel",
    "disaggregated",
    "hybrid",
)
# What the runtime carries out (each replica as a deployment of its own); the others are planned by rules of thumb only.
RUNNABLE_STRATEGIES = ("single_node", "layer_wise", "data_parallel")
OBJECTIVES = ("latency", "throughput", "bottleneck", "fit", "weighted")


class Workload(Record):
    """What the machines are to do."""

    prompt_tokens: int = 512
    output_tokens: int = 128
    num_users: int = 1  # sessions at the same time
    context_tokens: int | None = None  # KV reserved for each session; None = prompt + output
    kv_type: str = "f16"
    prefill_chunk_tokens: int = 64
    warm: bool = False  # another prompt took the same way a moment before: TCP's windows are open

    @property
    def reserved_tokens(self) -> int:
        """Positions of KV cache kept for each session."""
        return self.context_tokens if self.context_tokens is not None else self.prompt_tokens + self.output_tokens

    @property
    def num_prefill_chunks(self) -> int:
        return max(1, -(-self.prompt_tokens // max(1, self.prefill_chunk_tokens)))

    @property
    def mean_context_tokens(self) -> float:
        """Positions that a decode step reads on average: the context grows from the prompt to prompt + output."""
        return self.prompt_tokens + 0.5 * max(0, self.output_tokens - 1)


class Objective(Record):
    """What is minimized.

    `latency`: seconds of one request alone (prefill and decode). `throughput`: seconds per token for `num_users`
    (its inverse is aggregate tokens/s). `bottleneck`: seconds of the slowest stage or link for one token. `fit`: number
    of machines, then latency. `weighted`: `weight` * latency per token + (1 - `weight`) * seconds per token in throughput.
    """

    kind: str = "latency"
    weight: float = 0.5


class Limits(Record):
    """What a plan must keep to. `None` = no limit."""

    memory_fraction: float = 1.0  # share of each device's memory that may be used
    max_time_to_first_token_s: float | None = None
    max_inter_token_p95_s: float | None = None
    min_decode_tokens_per_s: float | None = None
    min_availability: float | None = None
    max_stages: int | None = None


class Speculation(Record):
    """A draft of `draft_tokens` (gamma) tokens that the pipeline verifies in one step."""

    draft_tokens: int
    acceptance: float  # chance that one drafted token is accepted, 0..1
    draft_token_s: float  # what drafting one token costs, on stage 0


class PlanRequest(Record):
    """One question to the planner."""

    model: ModelDescription
    cluster: ClusterProfile
    workload: Workload = Workload()
    objective: Objective = Objective()
    limits: Limits = Limits()
    strategies: tuple[str, ...] = RUNNABLE_STRATEGIES  # what may be chosen; the others show up as alternatives
    wire_dtypes: tuple[str, ...] = ("f32",)  # what may be chosen
    speculation: tuple[Speculation, ...] = ()  # drafts that may be chosen
    time_limit_s: float = 20.0  # of search on one core, about: it is counted in work, so results do not depend on the clock
    seed: int = 0


class RankAssignment(Record):
    """What one device holds of a stage. `share` is its part of the stage's heads and features (1.0 without ranks)."""

    node: str
    device: str
    share: float
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int
    memory_limit_bytes: int
    experts: tuple[int, int] | None = None  # expert parallel: the experts [start, end) of every sparse layer

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.workspace_bytes


class StageAssignment(Record):
    """A run of consecutive layers [start, end) and who holds it."""

    layers: tuple[int, int]
    ranks: tuple[RankAssignment, ...]

    @property
    def node(self) -> str:
        return self.ranks[0].node


class Percentiles(Record):
    """Seconds."""

    p50: float
    p95: float
    p99: float = 0.0


class StageCompute(Record):
    """Seconds of compute in one stage: a whole prompt, and one decode step."""

    prefill_total: float
    decode_p50: float
    decode_p95: float


class StagePrediction(Record):
    """One stage, under the names of `run --json`."""

    node: str
    layers: tuple[int, int]
    weight_bytes: int
    kv_bytes: int
    peak_memory_bytes: int
    compute_s: StageCompute
    wait_s: Percentiles
    utilization: float  # share of the decode time in which the stage computes
    paging: bool = False  # memory is short: weights come from disk at every step


class TensorShape(Record):
    """What crosses a boundary for one token."""

    shape: tuple[int, ...]
    dtype: str


class BoundaryPrediction(Record):
    """One hop of the ring, under the names of `run --json`."""

    source: str = msgspec.field(name="from")
    target: str = msgspec.field(name="to")
    tensor: TensorShape
    bytes_per_token: float
    transfer_s: Percentiles  # one decode message
    copy_s: Percentiles
    sync_wait_s: Percentiles
    prefill_transfer_s: float = 0.0  # one prefill chunk
    share_of_token: float = 0.0  # of the time of one decode token


class Prediction(Record):
    """What the plan will do, before it runs. Decode percentiles come from a seeded event simulation."""

    time_to_first_token_s: float
    inter_token_s: Percentiles
    decode_tokens_per_s: float  # of one user
    prefill_tokens_per_s: float
    aggregate_tokens_per_s: float  # all tokens of all users / wall time from the first request on
    time_per_output_token_s: float  # mean, of one user
    request_s: float  # one request: first token and all others
    stages: tuple[StagePrediction, ...]
    boundaries: tuple[BoundaryPrediction, ...]
    bottleneck: str  # "stage 1 (nas)" or "link desktop -> nas"
    communication_share: float  # of the time of one decode token
    availability: float
    sync_s: float = 0.0  # tensor- or expert-parallel syncs of one token


class Alternative(Record):
    """Another plan that was evaluated."""

    strategy: str
    nodes: tuple[str, ...]
    layers: tuple[tuple[int, int], ...]
    wire_dtype: str
    objective_value: float
    decode_tokens_per_s: float
    aggregate_tokens_per_s: float
    time_to_first_token_s: float
    runnable: bool
    note: str = ""


class Rejection(Record):
    """A candidate that cannot be, and by how many bytes."""

    strategy: str
    nodes: tuple[str, ...]
    reason: str
    short_by_bytes: int = 0


class Reason(Record):
    """One case of the advice that applies."""

    case: str
    message: str
    numbers: dict[str, Any]


class Advice(Record):
    """Should the model be split at all? Verdict first."""

    verdict: str
    headline: str
    reasons: tuple[Reason, ...]


class Plan(Record):
    """The decision."""

    strategy: str
    stages: tuple[StageAssignment, ...]
    replicas: int = 1
    replica_stages: tuple[tuple[StageAssignment, ...], ...] = ()  # the stages of the further replicas
    prefill_stages: tuple[StageAssignment, ...] = ()  # disaggregated: where prompts are read
    speculation: Speculation | None = None
    wire_dtype: str = "f32"
    predicted: Prediction | None = None
    objective: str = "latency"
    objective_value: float = 0.0  # seconds, see `Objective`
    optimal: bool = False  # proven for the objective among the searched strategies
    gap: float | None = None  # (value - bound) / value where not proven; 0 where proven
    method: str = ""
    runnable: bool = True  # False: `run` and `serve` cannot carry it out, see `note`
    note: str = ""
    alternatives: tuple[Alternative, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    advice: Advice | None = None

    @property
    def pipelines(self) -> tuple[tuple[StageAssignment, ...], ...]:
        """The stages of every replica."""
        return (self.stages, *self.replica_stages)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the machines used, in order of first use."""
        groups = [*self.pipelines, self.prefill_stages]
        return tuple(dict.fromkeys(r.node for stages in groups for stage in stages for r in stage.ranks))
