"""What each recovery policy would cost a plan in memory, and what it would save in seconds when a stage is lost. Pure.

    a plan with its prediction + the workload -> one `PolicyCost` each for none, standby, hot, checkpoints

The stall is that of the worst moment and the worst stage: all users have nearly finished, so every row of theirs must be computed
again by the lost stage, in the old shapes (`deploy.stall` has the same formula with measured times):

    detection + reconnection + process start and load + users x (prefill + output tokens x decode step) of that stage

A hot replica has all of that; a standby replica has the process; a checkpoint bounds the tokens. **Fails when** never: plans that
the program cannot run, or without a prediction, have no costs. **Called by** `cli` (`plan`, `advise`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from shardwise.planner.types import RUNNABLE_STRATEGIES, Plan, PlanRequest, StageAssignment, StagePrediction
from shardwise.records import Record
from shardwise.session.recovery import DETECTION_S, RECONNECTION_S, Cause

PROCESS_START_S = 0.5  # interpreter, libraries, handshake (measured, benchmarks/evidence/recovery.md)
LOAD_BYTES_PER_S = 1e9  # of a slice that the system still has in memory, where a node's disk is not known
CHECKPOINT_TOKENS = 256
HOT_SILENCE_S = 0.9  # silence that is enough to switch to a hot replica
DRIVER = "driver"  # the machine that runs the sessions


class NodeBytes(Record):
    """What one machine must have beside the plan."""

    node: str
    extra_bytes: int
    short_by_bytes: int = 0  # that it has not


class Stall(Record):
    """Seconds until the sentence goes on, at the worst moment."""

    stage: int  # the one whose loss costs most
    killed_s: float
    silent_s: float  # asleep, stopped, cut off


class PolicyCost(Record):
    """One policy."""

    policy: str  # none | standby | hot | checkpoints
    flags: str  # of run and serve
    memory: tuple[NodeBytes, ...]
    extra_bytes: int
    fits: bool
    compute_factor: float  # 2 = every row is computed twice
    stall: Stall
    saves_s: float  # against none, of a killed worker


def policy_costs(request: PlanRequest, plan: Plan) -> tuple[PolicyCost, ...]:
    """All policies, cheapest first; empty for a plan that `run` cannot carry out."""
    predicted = plan.predicted
    if predicted is None or plan.strategy not in RUNNABLE_STRATEGIES or len(predicted.stages) != len(plan.stages):
        return ()
    disks = {node.name: node.disk_bytes_per_s.value for node in request.cluster.nodes if node.disk_bytes_per_s is not None}
    spare = _memory(_replicas(plan), plan)
    refill = [_refill_s(stage, request, request.workload.output_tokens) for stage in predicted.stages]
    start = [_start_s(stage, disks) for stage in predicted.stages]
    short = [
        _refill_s(stage, request, min(request.workload.output_tokens, CHECKPOINT_TOKENS), prompt=False)
        for stage in predicted.stages
    ]
    none = _stall(_added(start, refill))
    copies = (NodeBytes(node=DRIVER, extra_bytes=_checkpoint_bytes(request, len(plan.pipelines))),)
    rows: list[tuple[str, str, tuple[NodeBytes, ...], float, Stall]] = [
        ("none", "", (), 1.0, none),
        ("checkpoints", f"--checkpoint-every {CHECKPOINT_TOKENS}", copies, 1.0, _stall(_added(start, short))),
        ("standby", "--replicate standby", spare, 1.0, _stall(refill)),
        ("hot", "--replicate hot", spare, 2.0, _stall([0.0] * len(start), HOT_SILENCE_S)),
    ]
    return tuple(
        PolicyCost(
            policy=name,
            flags=flags,
            memory=memory,
            extra_bytes=sum(one.extra_bytes for one in memory),
            fits=not any(one.short_by_bytes for one in memory),
            compute_factor=factor,
            stall=stall,
            saves_s=max(0.0, none.killed_s - stall.killed_s),
        )
        for name, flags, memory, factor, stall in rows
    )


def _added(one: Iterable[float], other: Iterable[float]) -> list[float]:
    return [a + b for a, b in zip(one, other, strict=True)]


def _stall(after_s: list[float], silence_s: float = DETECTION_S[Cause.SILENT]) -> Stall:
    worst = max(range(len(after_s)), key=lambda stage: after_s[stage])
    rest_s = RECONNECTION_S + after_s[worst]
    return Stall(stage=worst, killed_s=DETECTION_S[Cause.CRASHED] + rest_s, silent_s=silence_s + rest_s)


def _start_s(stage: StagePrediction, disks: Mapping[str, float]) -> float:
    return PROCESS_START_S + stage.weight_bytes / (disks.get(stage.node) or LOAD_BYTES_PER_S)


def _refill_s(stage: StagePrediction, request: PlanRequest, num_tokens: int, *, prompt: bool = True) -> float:
    """Of every user's rows in one stage."""
    prefill_s = stage.compute_s.prefill_total if prompt else 0.0
    return request.workload.num_users * (prefill_s + num_tokens * stage.compute_s.decode_p50)


def _replicas(plan: Plan) -> list[tuple[str, StageAssignment]]:
    """Each stage's replica runs on the next stage's machine."""
    return [(stages[(i + 1) % len(stages)].node, stage) for stages in plan.pipelines for i, stage in enumerate(stages)]


def _memory(replicas: list[tuple[str, StageAssignment]], plan: Plan) -> tuple[NodeBytes, ...]:
    """Bytes of the replicas on each machine, against what the plan leaves there."""
    extra: dict[str, int] = defaultdict(int)
    for node, stage in replicas:
        extra[node] += sum(rank.total_bytes for rank in stage.ranks)
    used: dict[str, int] = defaultdict(int)
    limits: dict[str, dict[str, int]] = defaultdict(dict)
    for rank in (rank for stages in plan.pipelines for stage in stages for rank in stage.ranks):
        used[rank.node] += rank.total_bytes
        limits[rank.node][rank.device] = rank.memory_limit_bytes
    return tuple(
        NodeBytes(node=node, extra_bytes=size, short_by_bytes=max(0, size + used[node] - sum(limits[node].values())))
        for node, size in extra.items()
    )


def _checkpoint_bytes(request: PlanRequest, num_pipelines: int) -> int:
    """KV of all layers and users at their longest, in the driver's memory or directory."""
    work = request.workload
    tokens = work.prompt_tokens + work.output_tokens
    return round(request.model.kv_bytes_per_token(kv_type=work.kv_type) * tokens * work.num_users * num_pipelines)
