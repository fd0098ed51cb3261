"""A proposal from files: the plan that runs, the cluster as it is now, the model; the planner does the thinking.

**Promises** both plans are judged on the same, present cluster. **Fails with** `UsageError` (files, a plan for another
model) and `NoFeasiblePlanError`. **Called by** `cluster propose`.
"""

from __future__ import annotations

import math
from pathlib import Path

from shardwise.cluster.reconcile import Proposal, propose
from shardwise.errors import UsageError
from shardwise.machines import load_cluster
from shardwise.model import describe_model
from shardwise.planner import find_plan, predict
from shardwise.planner.cost_model import CostModel
from shardwise.planner.cost_rates import RuntimeCosts
from shardwise.planner.evaluate import plan_value
from shardwise.planner.plan_file import load_plan
from shardwise.planner.types import Objective, Plan, PlanRequest, Workload
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


def judged(request: PlanRequest, plan: Plan) -> Plan:
    """The plan with what it is worth on the request's cluster; worth nothing where one of its nodes is gone."""
    known = {node.name for node in request.cluster.nodes}
    if not set(plan.nodes) <= known:
        return replace(plan, objective_value=math.inf, predicted=None)
    value = plan_value(CostModel(request, RuntimeCosts()), plan)
    return replace(plan, objective_value=value, predicted=predict(request, plan))
