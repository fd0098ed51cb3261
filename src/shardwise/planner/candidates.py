"""Candidate plans of one strategy each: pipelines, replicas, tensor- and expert-parallel groups, separate prefill.

In: a cost model and a work budget. Out: `Candidate`s with their value and, for the exact strategies, a bound. Values come
from `plan_value`, so candidates of all strategies compare. Nothing fails: a strategy without a fitting plan yields nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.planner.cost_model import CostModel
from shardwise.planner.cuts import boundaries, limits_cuts
from shardwise.planner.evaluate import plan_value
from shardwise.planner.objective import objective_forms
from shardwise.planner.problem import Stage, build_problem
from shardwise.planner.search_dp import MAX_UNITS, Budget
from shardwise.planner.search_pareto import Searched, search_forms
from shardwise.planner.types import Plan, Speculation, StageAssignment
from shardwise.planner.units import Unit
from shardwise.records import replace


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with the value that it is compared by."""

    plan: Plan
    value: float
    bound: float | None = None  # None: the strategy has no proof
    method: str = ""


def candidate(model: CostModel, plan: Plan, bound: float | None = None, method: str = "") -> Candidate | None:
    """The plan with its value; None where it does not fit."""
    value = plan_value(model, plan)
    return Candidate(plan, value, bound, method) if math.isfinite(value) else None


def as_stages(model: CostModel, units: list[Unit], stages: tuple[Stage, ...], sessions: int) -> tuple[StageAssignment, ...]:
    """Assignments with their bytes."""
    return tuple(model.whole_stage(units[u], start, end, sessions=sessions) for u, start, end in stages)


def as_plan(pipelines: Sequence[tuple[StageAssignment, ...]]) -> Plan:
    """A plan of several pipelines."""
    return Plan(
        strategy="data_parallel",
        stages=pipelines[0],
        replicas=len(pipelines),
        replica_stages=tuple(pipelines[1:]),
    )


def useful_units(model: CostModel, limit: int = MAX_UNITS) -> list[Unit]:
    """The units that search looks at: all, or the `limit` that hold and compute most."""
    if len(model.units) <= limit:
        return model.units
    layers = max(1, model.model.num_layers)
    per_layer = model.model.weight_bytes / layers

    def worth(unit: Unit) -> float:
        held = min(layers, model.memory_limit_bytes(unit) / per_layer)
        return held * unit.device.memory_bytes_per_s.value

    chosen = sorted(model.units, key=worth, reverse=True)[:limit]
    keys = {unit.key for unit in chosen}
    return [unit for unit in model.units if unit.key in keys]


def best_pipeline(
    model: CostModel,
    budget: Budget,
    *,
    units: list[Unit] | None = None,
    users: int | None = None,
    wire_dtype: str = "f32",
    draft: Speculation | None = None,
    min_stages: int = 1,
) -> tuple[Plan | None, Searched]:
    """The best single pipeline (or single machine) over `units` for `users` sessions."""
    pool = useful_units(model) if units is None else units
    sessions = model.workload.num_users if users is None else users
    workload = replace(model.workload, num_users=sessions)
    most = min(len(pool), len(boundaries(model.model)) - 1, model.request.limits.max_stages or len(pool))
    forms = objective_forms(workload, model.request.objective, max(1, most), draft)
    forms = [
        dataclasses.replace(form, min_stages=max(form.min_stages, min_stages), max_stages=min(form.max_stages, most))
        for form in forms
        if form.max_stages >= min_stages
    ]
    problems = [build_problem(model, form, wire_dtype, units=pool, sessions=sessions) for form in forms]
    _, found = search_forms(problems, budget=budget)
    if not found.stages:
        return None, found
    layers_of = problems[0].layers_of
    stages = as_stages(model, pool, tuple((u, *layers_of(a, b)) for u, a, b in found.stages), sessions)
    strategy = "single_node" if len(stages) == 1 else "layer_wise"
    if limits_cuts(model.model):
        found = dataclasses.replace(found, method=f"{found.method}, cuts where {model.model.architecture} allows them")
    return Plan(strategy=strategy, stages=stages, wire_dtype=wire_dtype, speculation=draft), found
