"""Plans in which several devices share a stage: tensor parallelism with uneven shares, experts spread over ranks.

In: a cost model. Out: the best such plan, found by trying groups of the strongest units, or None. Shares are whole KV
heads (tensor parallelism) and whole experts (expert parallelism), in proportion to memory bandwidth under each unit's
memory. Nothing here fails.
"""

from __future__ import annotations

import itertools
import math

from shardwise.planner.candidates import Candidate, candidate
from shardwise.planner.cost_memory import expert_rank_memory, rank_memory
from shardwise.planner.cost_model import CostModel
from shardwise.planner.types import Plan, RankAssignment, StageAssignment
from shardwise.planner.units import Unit

_MAX_POOL = 8
_MAX_GROUP = 8


def proportional_counts(total: int, weights: list[float], caps: list[int]) -> list[int] | None:
    """`total` whole things over ranks in proportion to `weights`, at most `caps`, at least one each; None if they do not fit."""
    if sum(caps) < total or total < len(weights) or min(caps) < 1:
        return None
    counts = [1] * len(weights)
    for _ in range(total - len(weights)):
        open_ranks = [i for i, c in enumerate(counts) if c < caps[i]]
        best = min(open_ranks, key=lambda i: (counts[i] + 1) / weights[i] if weights[i] > 0 else math.inf)
        counts[best] += 1
    return counts


def _groups(model: CostModel, smallest: int = 2) -> list[tuple[Unit, ...]]:
    """Groups of strong units: every subset of a small pool, otherwise the strongest few."""
    pool = sorted(model.units, key=lambda u: u.device.memory_bytes_per_s.value, reverse=True)[:_MAX_POOL]
    sizes = range(smallest, min(len(pool), _MAX_GROUP) + 1)
    if len(pool) <= 5:
        return [group for size in sizes for group in itertools.combinations(pool, size)]
    return [tuple(pool[:size]) for size in sizes]


def _rank(
    model: CostModel, unit: Unit, share: float, memory: tuple[int, int, int], experts: tuple[int, int] | None
) -> RankAssignment:
    weights, kv, workspace = memory
    return RankAssignment(
        node=unit.node.name,
        device=unit.device_name,
        share=share,
        weight_bytes=weights,
        kv_bytes=kv,
        workspace_bytes=workspace,
        memory_limit_bytes=model.memory_limit_bytes(unit),
        experts=experts,
    )


def _kv_heads(model: CostModel) -> int:
    """KV heads that can be dealt out: of the layer that has fewest; 0 where no layer has any (recurrent layers have none)."""
    return min((layer.kv.num_kv_heads for layer in model.model.layers if layer.kv.num_kv_heads), default=0)


def tensor_parallel_plan(model: CostModel, group: tuple[Unit, ...], wire_dtype: str = "f32") -> Plan | None:
    """One stage with all layers, every matrix cut over `group`; None where memory or heads do not suffice."""
    last = model.model.num_layers
    heads = _kv_heads(model)
    if not heads:
        return None
    whole = rank_memory(model.model, 0, last, model.workload, model.costs)
    per_head = (whole.weight_bytes + whole.kv_bytes) / heads
    caps = [int((model.memory_limit_bytes(u) - whole.workspace_bytes) // per_head) for u in group]
    counts = proportional_counts(heads, [u.device.memory_bytes_per_s.value for u in group], caps)
    if counts is None:
        return None
    ranks = []
    for unit, count in zip(group, counts):
        share = count / heads
        memory = rank_memory(model.model, 0, last, model.workload, model.costs, share=share)
        ranks.append(_rank(model, unit, share, (memory.weight_bytes, memory.kv_bytes, memory.workspace_bytes), None))
    stage = StageAssignment(layers=(0, last), ranks=tuple(ranks))
    return Plan(strategy="tensor_parallel", stages=(stage,), wire_dtype=wire_dtype)


def expert_parallel_plan(model: CostModel, group: tuple[Unit, ...], wire_dtype: str = "f32") -> Plan | None:
    """One stage with all layers: the dense part on the first unit, the experts over all; None for dense models."""
    sparse = [layer.experts for layer in model.model.layers if layer.experts is not None]
    if not sparse:
        return None
    last, total = model.model.num_layers, sparse[0].num_experts
    each = sum(spec.expert_bytes for spec in sparse)
    caps = []
    for index, unit in enumerate(group):
        empty = expert_rank_memory(model.model, 0, last, (0, 0), model.workload, model.costs, dense=index == 0)
        caps.append(int((model.memory_limit_bytes(unit) - empty.total_bytes) // max(1, each)))
    counts = proportional_counts(total, [u.device.memory_bytes_per_s.value for u in group], caps)
    if counts is None:
        return None
    ranks, first = [], 0
    for index, (unit, count) in enumerate(zip(group, counts)):
        owned = (first, first + count)
        memory = expert_rank_memory(model.model, 0, last, owned, model.workload, model.costs, dense=index == 0)
        numbers = (memory.weight_bytes, memory.kv_bytes, memory.workspace_bytes)
        ranks.append(_rank(model, unit, count / total, numbers, owned))
        first += count
    stage = StageAssignment(layers=(0, last), ranks=tuple(ranks))
    return Plan(strategy="expert_parallel", stages=(stage,), wire_dtype=wire_dtype)


def best_tensor_parallel(model: CostModel) -> Candidate | None:
    """The best tensor-parallel group."""
    plans = [tensor_parallel_plan(model, group) for group in _groups(model)]
    return _best(model, plans, "groups of the strongest devices")


def best_expert_parallel(model: CostModel) -> Candidate | None:
    """The best spread of experts."""
    plans = [expert_parallel_plan(model, group) for group in _groups(model)]
    return _best(model, plans, "groups of the strongest devices")


def best_disaggregated(model: CostModel) -> Candidate | None:
    """One machine reads prompts, another one decodes; both hold the whole model."""
    last = model.model.num_layers
    plans: list[Plan | None] = []
    for reader, writer in itertools.permutations(model.units[: 4 * _MAX_POOL], 2):
        if reader.node.name != writer.node.name:
            plans.append(
                Plan(
                    strategy="disaggregated",
                    stages=(model.whole_stage(writer, 0, last),),
                    prefill_stages=(model.whole_stage(reader, 0, last),),
                )
            )
    return _best(model, plans, "all pairs of machines")


def best_hybrid(model: CostModel, pipeline: Plan) -> Candidate | None:
    """A pipeline whose stages are shared by the equal accelerators of each machine, where it has several."""
    stages = []
    for stage in pipeline.stages:
        rank = stage.ranks[0]
        twins = [
            u for u in model.units if u.node.name == rank.node and u.device.kind == model.unit(rank.node, rank.device).device.kind
        ]
        used = sum(1 for s in pipeline.stages if s.node == rank.node)
        heads = _kv_heads(model)
        if len(twins) < 2 or used > 1 or not heads or heads % len(twins):
            stages.append(stage)
            continue
        share = 1.0 / len(twins)
        memory = rank_memory(model.model, *stage.layers, model.workload, model.costs, share=share)
        numbers = (memory.weight_bytes, memory.kv_bytes, memory.workspace_bytes)
        stages.append(StageAssignment(layers=stage.layers, ranks=tuple(_rank(model, u, share, numbers, None) for u in twins)))
    if all(len(stage.ranks) == 1 for stage in stages):
        return None
    strategy = "hybrid" if len(stages) > 1 else "tensor_parallel"
    return candidate(model, Plan(strategy=strategy, stages=tuple(stages), wire_dtype=pipeline.wire_dtype))


def _best(model: CostModel, plans: list[Plan | None], method: str) -> Candidate | None:
    found = [c for c in (candidate(model, plan, method=method) for plan in plans if plan is not None) if c is not None]
    return min(found, key=lambda c: c.value, default=None)
