"""Data parallelism: several copies of the pipeline on disjoint machines, each with its share of the users.

In: a cost model and a work budget. Out: the best plan with two or more replicas, or None. Up to `SMALL_POOL` units every
division of the units into sets is considered (dynamic programming over sets, the best pipeline of each set being exact);
beyond that `search_columns` packs pipelines made of device classes. Nothing here fails.
"""

from __future__ import annotations

import dataclasses

from shardwise.planner.candidates import Candidate, as_plan, best_pipeline, candidate
from shardwise.planner.cost_memory import rank_memory
from shardwise.planner.cost_model import CostModel
from shardwise.planner.search_columns import pack_pipelines
from shardwise.planner.search_dp import Budget
from shardwise.planner.types import StageAssignment

SMALL_POOL = 6


def replica_limit(model: CostModel) -> int:
    """No more replicas than users, machines, and copies of the model that all memory together holds."""
    need = rank_memory(model.model, 0, model.model.num_layers, model.workload, model.costs, sessions=1)
    room = sum(model.memory_limit_bytes(u) for u in model.units)
    copies = int(room // max(1, need.weight_bytes))
    return min(model.workload.num_users, len(model.units), copies)


def best_replicas(model: CostModel, budget: Budget) -> Candidate | None:
    """The best plan with at least two replicas; only throughput gains from copies."""
    limit = replica_limit(model)
    if limit < 2 or model.request.objective.kind not in ("throughput", "weighted"):
        return None
    if len(model.units) > SMALL_POOL:
        return pack_pipelines(model, limit)
    found = [_divide(model, count, budget) for count in range(2, limit + 1)]
    if all(model.workload.num_users % count == 0 for count in range(2, limit + 1)):
        found = [dataclasses.replace(c, bound=c.value) if c is not None else None for c in found]
    return min((c for c in found if c is not None), key=lambda c: c.value, default=None)


def _divide(model: CostModel, replicas: int, budget: Budget) -> Candidate | None:
    """Divide all units into `replicas` sets, each with its best pipeline for its share of the users."""
    count = len(model.units)
    sessions = -(-model.workload.num_users // replicas)
    best: dict[int, tuple[float, tuple[StageAssignment, ...]]] = {}
    for mask in range(1, 1 << count):
        if mask.bit_count() > count - replicas + 1:
            continue
        units = [model.units[i] for i in range(count) if mask >> i & 1]
        plan, found = best_pipeline(model, Budget(budget.cells / 64), units=units, users=sessions)
        if plan is not None:
            best[mask] = (1.0 / found.value, plan.stages)
    total: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for _ in range(replicas):
        grown: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (rate, parts) in total.items():
            for mask, (more, _) in best.items():
                if mask & used == 0 and (not parts or mask > parts[-1]):
                    option = (rate + more, (*parts, mask))
                    grown[used | mask] = max(grown.get(used | mask, (0.0, ())), option)
        total = grown
    rate, parts = max(total.values(), default=(0.0, ()))
    if not parts:
        return None
    return candidate(model, as_plan([best[mask][1] for mask in parts]), method="division of the machines into sets")
