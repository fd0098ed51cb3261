"""The planner's front door: a request in, the best plan out, with prediction, alternatives, rejections and advice.

Fails with `UsageError` for a request that contradicts itself (context beyond the model's, unknown words) and with
`NoFeasiblePlanError` where nothing fits, which tells the nearest miss in bytes for every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from shardwise.errors import NoFeasiblePlanError
from shardwise.model.description import ModelDescription
from shardwise.planner.advice import advice_for
from shardwise.planner.advice_numbers import Situation
from shardwise.planner.candidates import Candidate, best_pipeline, candidate
from shardwise.planner.check_request import check_request
from shardwise.planner.cost_model import DEFAULT_COSTS, CostModel
from shardwise.planner.cost_rates import RuntimeCosts
from shardwise.planner.group_plans import best_disaggregated, best_expert_parallel, best_hybrid, best_tensor_parallel
from shardwise.planner.machine_plans import machine_candidates
from shardwise.planner.objective import FIT_PENALTY_S
from shardwise.planner.predict import predict_with
from shardwise.planner.recommend import recommended
from shardwise.planner.rejections import infeasible, limit_reasons, rejections
from shardwise.planner.replica_plans import best_replicas
from shardwise.planner.runnable import plan_note, plan_obstacles
from shardwise.planner.search_dp import CELLS_PER_S, Budget
from shardwise.planner.types import (
    Advice,
    Alternative,
    Limits,
    Plan,
    PlanRequest,
    Prediction,
    Rejection,
)
from shardwise.records import replace

Smaller = Sequence[ModelDescription] | Callable[[], Sequence[ModelDescription]]

_MAX_ALTERNATIVES = 8


def find_plan(
    request: PlanRequest,
    costs: RuntimeCosts = DEFAULT_COSTS,
    *,
    smaller: Sequence[ModelDescription] = (),
    as_advised: bool = False,
) -> Plan:
    """The best plan that keeps to the limits, with advice; `smaller` are the same model at smaller quantizations.

    `as_advised`: the plan that the advice recommends instead, where a simpler one is nearly as good.
    """
    check_request(request)
    model = CostModel(request, costs)
    found = _candidates(model)
    if not found:
        raise infeasible(model)
    chosen, judged = _choose(model, found)
    plan = replace(
        chosen.plan,
        predicted=judged[id(chosen)],
        objective=request.objective.kind,
        objective_value=_seconds(chosen.value),
        optimal=_is_optimal(chosen, found, request),
        gap=_gap(chosen, found, request),
        method=chosen.method,
        alternatives=_alternatives(model, chosen, found, judged),
        rejections=rejections(model),
    )
    plan = replace(plan, runnable=not plan_obstacles(plan), note=plan_note(plan))
    situation = Situation(model, plan, list(smaller))
    plan = replace(plan, advice=advice_for(situation))
    return recommended(situation, plan) if as_advised else plan


def consult(
    request: PlanRequest, smaller: Smaller = (), costs: RuntimeCosts = DEFAULT_COSTS, *, as_advised: bool = True
) -> tuple[Plan | None, Advice, tuple[Rejection, ...]]:
    """Plan, advice and rejections in one; no plan where nothing fits or keeps to the limits."""
    options = list(smaller() if callable(smaller) else smaller)
    try:
        plan = find_plan(request, costs, smaller=options, as_advised=as_advised)
    except NoFeasiblePlanError:
        return _without_plan(request, options, costs)
    assert plan.advice is not None
    return plan, plan.advice, plan.rejections


def _without_plan(
    request: PlanRequest, smaller: list[ModelDescription], costs: RuntimeCosts
) -> tuple[None, Advice, tuple[Rejection, ...]]:
    """Advice when nothing fits, or when the limits forbid what would."""
    model = CostModel(request, costs)
    loose = Limits(memory_fraction=request.limits.memory_fraction)
    try:
        plan = find_plan(replace(request, limits=loose), costs)
    except NoFeasiblePlanError:
        return None, advice_for(Situation(model, None, smaller)), rejections(model)
    assert plan.predicted is not None
    broken = tuple(limit_reasons(request.limits, plan.predicted, plan)) or ("no plan keeps to them",)
    return None, advice_for(Situation(model, plan, smaller, broken)), rejections(model)


def advise(request: PlanRequest, smaller: Smaller = (), costs: RuntimeCosts = DEFAULT_COSTS) -> Advice:
    """Should the model be split at all? Nothing that fits is a verdict here, not an error.

    `smaller` are descriptions of the same model at smaller quantizations, or a function that makes them.
    """
    return consult(request, smaller, costs)[1]


def _seconds(value: float) -> float:
    """The objective without the penalty a machine that `fit` adds."""
    return math.fmod(value, FIT_PENALTY_S) if value >= FIT_PENALTY_S else value


def _candidates(model: CostModel) -> list[Candidate]:
    """The best of every strategy, wire dtype and draft; pipelines first."""
    request = model.request
    budget = Budget(request.time_limit_s * CELLS_PER_S)
    variants = [(wire, draft) for wire in request.wire_dtypes for draft in (None, *request.speculation)]
    out: list[Candidate] = []
    for number, (wire, draft) in enumerate(variants):
        share = Budget(0.7 * budget.cells / (len(variants) - number))
        plan, searched = best_pipeline(model, share, wire_dtype=wire, draft=draft)
        if plan is not None:
            out.append(Candidate(plan, searched.value, searched.bound, searched.method))
    out += _single_machines(model)
    out += _machines_over_devices(model)
    pipeline = min(out, key=lambda c: c.value, default=None)
    others = [
        best_replicas(model, budget),
        best_tensor_parallel(model),
        best_expert_parallel(model),
        best_disaggregated(model),
        best_hybrid(model, pipeline.plan) if pipeline is not None else None,
    ]
    return out + [c for c in others if c is not None]


def _single_machines(model: CostModel) -> list[Candidate]:
    """Every unit that holds the model alone, best first."""
    last = model.model.num_layers
    wire = model.request.wire_dtypes[0]
    plans = [Plan(strategy="single_node", stages=(model.whole_stage(u, 0, last),), wire_dtype=wire) for u in model.units]
    found = [c for c in (candidate(model, plan, method="enumeration") for plan in plans) if c is not None]
    return sorted(found, key=lambda c: c.value)[:3]


def _machines_over_devices(model: CostModel) -> list[Candidate]:
    """The best machines that hold the model alone, but only on several of their devices together."""
    found = [c for c in machine_candidates(model, model.request.wire_dtypes[0]).values() if len(c.plan.stages) > 1]
    return sorted(found, key=lambda c: c.value)[:3]


def _choose(model: CostModel, found: list[Candidate]) -> tuple[Candidate, dict[int, Prediction]]:
    """The best allowed candidate that keeps to the limits."""
    allowed = sorted((c for c in found if c.plan.strategy in model.request.strategies), key=lambda c: c.value)
    judged: dict[int, Prediction] = {}
    misses: list[Rejection] = []
    for option in allowed:
        judged[id(option)] = predict_with(model, option.plan)
        reasons = limit_reasons(model.request.limits, judged[id(option)], option.plan)
        if not reasons:
            return option, judged
        misses.append(Rejection(strategy=option.plan.strategy, nodes=option.plan.nodes, reason="; ".join(reasons)))
    if not allowed:
        raise infeasible(model)
    raise NoFeasiblePlanError(
        f"the model fits, but no plan keeps to the limits: {misses[0].reason}",
        where=", ".join(misses[0].nodes),
        hint="relax the limit, or see 'shardwise advise'",
        rejections=[{"strategy": m.strategy, "nodes": list(m.nodes), "reason": m.reason, "short_by_bytes": 0} for m in misses],
    )


def _bound(found: list[Candidate], request: PlanRequest) -> float | None:
    """Proven for the searched pipelines; None where any allowed strategy came without proof."""
    heuristic = set(request.strategies) - {"single_node", "layer_wise"}
    if "data_parallel" in heuristic and request.objective.kind not in ("throughput", "weighted"):
        heuristic.discard("data_parallel")
    pipelines = [c for c in found if c.plan.strategy in ("single_node", "layer_wise") and c.bound is not None]
    others = [c for c in found if c.plan.strategy in heuristic]
    if any(c.bound is None for c in others):
        return None
    return min((c.bound for c in [*pipelines, *others] if c.bound is not None), default=None)


def _gap(chosen: Candidate, found: list[Candidate], request: PlanRequest) -> float | None:
    bound = _bound(found, request)
    if bound is None or chosen.value <= 0:
        return None
    return max(0.0, (chosen.value - bound) / chosen.value)


def _is_optimal(chosen: Candidate, found: list[Candidate], request: PlanRequest) -> bool:
    gap = _gap(chosen, found, request)
    return gap is not None and gap < 1e-7


def _alternatives(
    model: CostModel, chosen: Candidate, found: list[Candidate], judged: dict[int, Prediction]
) -> tuple[Alternative, ...]:
    out: list[Alternative] = []
    seen = {(chosen.plan.strategy, chosen.plan.nodes, chosen.plan.wire_dtype, chosen.plan.speculation)}
    for option in sorted(found, key=lambda c: c.value):
        key = (option.plan.strategy, option.plan.nodes, option.plan.wire_dtype, option.plan.speculation)
        if key in seen:
            continue
        seen.add(key)
        numbers = judged[id(option)] if id(option) in judged else predict_with(model, option.plan)
        runnable = not plan_obstacles(option.plan)
        broken = limit_reasons(model.request.limits, numbers, option.plan)
        notes = ([] if runnable else ["planned only"]) + broken
        out.append(
            Alternative(
                strategy=option.plan.strategy,
                nodes=option.plan.nodes,
                layers=tuple(stage.layers for stage in option.plan.stages),
                wire_dtype=option.plan.wire_dtype,
                objective_value=_seconds(option.value),
                decode_tokens_per_s=numbers.decode_tokens_per_s,
                aggregate_tokens_per_s=numbers.aggregate_tokens_per_s,
                time_to_first_token_s=numbers.time_to_first_token_s,
                runnable=runnable,
                note="; ".join(notes),
            )
        )
        if len(out) == _MAX_ALTERNATIVES:
            break
    return tuple(out)
