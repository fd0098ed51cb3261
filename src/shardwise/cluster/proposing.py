"""A proposal: what runs against the best plan for the cluster as it is now; the planner does the thinking.

**Promises** both plans are judged on the same, present cluster. **Fails with** `UsageError` (files, a plan for another
model) and `NoFeasiblePlanError`. **Called by** `cluster propose`, a running deployment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from shardwise.cluster.reconcile import Proposal, propose
from shardwise.errors import UsageError
from shardwise.machines import load_cluster
from shardwise.model import describe_model
from shardwise.planner import find_plan, predict
from shardwise.planner.cost_model import DEFAULT_COSTS, CostModel
from shardwise.planner.cost_rates import RuntimeCosts
from shardwise.planner.evaluate import plan_value
from shardwise.planner.plan_file import load_plan
from shardwise.planner.types import Objective, Plan, PlanRequest, RankAssignment, StageAssignment, Workload
from shardwise.records import replace


def propose_from_files(model: str, plan: Path, cluster: Path, *, num_users: int = 1) -> Proposal:
    """Compare the running plan with the best one for the cluster as it is now."""
    running = load_plan(plan)
    description = describe_model(model)
    covered = max(stage.layers[1] for stage in running.stages)
    if covered != description.num_layers:
        raise UsageError(
            f"the plan is for {covered} layers, '{model}' has {description.num_layers}", where=str(plan), hint="name its model"
        )
    workload = Workload(num_users=num_users)
    request = PlanRequest(
        model=description, cluster=load_cluster(cluster), workload=workload, objective=Objective(kind=running.objective)
    )
    return propose(description, judged(request, running), find_plan(request))


def propose_instead(
    request: PlanRequest, stages: Sequence[tuple[str, tuple[int, int]]], costs: RuntimeCosts
) -> tuple[Proposal, Plan]:
    """Compare what runs, (node, layers) of each stage, with the best plan for the request; the proposal and that plan."""
    better = find_plan(request, costs)
    running = judged(request, as_running(request, stages, costs), costs)
    return propose(request.model, running, better), better


def as_running(request: PlanRequest, stages: Sequence[tuple[str, tuple[int, int]]], costs: RuntimeCosts) -> Plan:
    """A plan of stages that run already, on each node's first device; nodes that the request does not know hold nothing."""
    model = CostModel(request, costs)
    devices = {unit.node.name: unit for unit in reversed(model.units)}
    found = tuple(
        model.whole_stage(devices[node], *layers) if node in devices else _stranger(request, node, layers)
        for node, layers in stages
    )
    return Plan(
        strategy="layer_wise" if len(found) > 1 else "single_node",
        stages=found,
        wire_dtype=request.wire_dtypes[0],
        objective=request.objective.kind,
    )


def _stranger(request: PlanRequest, node: str, layers: tuple[int, int]) -> StageAssignment:
    weight_bytes = request.model.stage_weight_bytes(*layers)
    rank = RankAssignment(
        node=node, device="", share=1.0, weight_bytes=weight_bytes, kv_bytes=0, workspace_bytes=0, memory_limit_bytes=0
    )
    return StageAssignment(layers=layers, ranks=(rank,))


def judged(request: PlanRequest, plan: Plan, costs: RuntimeCosts = DEFAULT_COSTS) -> Plan:
    """The plan with what it is worth on the request's cluster; worth nothing where one of its nodes is gone."""
    known = {node.name for node in request.cluster.nodes}
    if not set(plan.nodes) <= known:
        return replace(plan, objective_value=math.inf, predicted=None)
    value = plan_value(CostModel(request, costs), plan)
    return replace(plan, objective_value=value, predicted=predict(request, plan, costs))
