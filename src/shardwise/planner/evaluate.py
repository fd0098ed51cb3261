"""The objective of any plan in closed form: replicas, ranks, drafts, a separate prefill pipeline.

In: a cost model and a plan. Out: seconds, the figure that plans are compared by; for pipelines without ranks it equals
`Problem.value_of`. Also whether every rank fits. Fails with `UsageError` when the plan names an unknown node or device.
"""

from __future__ import annotations

import itertools
import math

from shardwise.planner.cost_links import activation_bytes, occupancy_s, token_bytes, transfer_s
from shardwise.planner.cost_model import CostModel
from shardwise.planner.objective import Form, Term, form_for
from shardwise.planner.predict import handover_s, split_users
from shardwise.planner.types import Plan, StageAssignment
from shardwise.records import replace


def overfull(plan: Plan) -> int:
    """Bytes by which the fullest rank exceeds its limit; 0 or less where everything fits."""
    ranks = [r for stages in (*plan.pipelines, plan.prefill_stages) for stage in stages for r in stage.ranks]
    return max(r.total_bytes - r.memory_limit_bytes for r in ranks)


def plan_value(model: CostModel, plan: Plan) -> float:
    """The request's objective for `plan`, seconds; infinite where a rank does not fit."""
    if overfull(plan) > 0:
        return math.inf
    users = split_users(model.workload.num_users, len(plan.pipelines))
    values = [_pipeline_value(model, plan, stages, count) for stages, count in zip(plan.pipelines, users) if count > 0]
    if model.request.objective.kind in ("throughput", "bottleneck"):
        return 1.0 / sum(1.0 / value for value in values)
    return sum(v * n for v, n in zip(values, users)) / sum(users)


def _pipeline_value(model: CostModel, plan: Plan, stages: tuple[StageAssignment, ...], users: int) -> float:
    workload = replace(model.workload, num_users=users)
    form = form_for(workload, model.request.objective, len(stages), plan.speculation)
    if not plan.prefill_stages:
        return form.combine(*_sums(model, form, form.terms, stages, plan.wire_dtype))
    decode = [t for t in form.terms if not t.is_prefill]
    prefill = [t for t in form.terms if t.is_prefill]
    add, peak = _sums(model, form, tuple(decode), stages, plan.wire_dtype)
    other_add, other_peak = _sums(model, form, tuple(prefill), plan.prefill_stages, plan.wire_dtype)
    handed = handover_s(model, plan) * sum(t.add for t in prefill)
    return form.combine(add + other_add + handed, max(peak, other_peak))


def _sums(
    model: CostModel, form: Form, terms: tuple[Term, ...], stages: tuple[StageAssignment, ...], wire_dtype: str
) -> tuple[float, float]:
    """(A, M) of one pipeline."""
    add, peak = form.stage_penalty * len(stages), 0.0
    for index, stage in enumerate(stages):
        mine = 0.0
        for term in terms:
            seconds = model.stage_step_s(stage, term.shape)[0] + (term.first_s if index == 0 else 0.0)
            add += term.add * seconds
            mine += term.peak * seconds
        peak = max(peak, mine)
    hidden, costs = model.model.hidden_size, model.costs
    names = [stage.node for stage in stages]
    for source, target in itertools.pairwise(names):
        link, mine = model.link(source, target), 0.0
        for term in terms:
            size = activation_bytes(hidden, term.shape.rows, wire_dtype, costs)
            add += term.add * transfer_s(link, size, costs)
            mine += term.peak * occupancy_s(link, size, costs)
        peak = max(peak, mine)
    if len(names) > 1:
        back = model.link(names[-1], names[0])
        add += sum(term.back * transfer_s(back, token_bytes(term.shape.rows, costs), costs) for term in terms)
    return add, peak
