"""What a local run will do, before it runs: the `predicted` of `run --json`, from rates of this machine.

    model + RunOptions + a measured node -> a plan of the same split -> planner.predict

Pure. **Fails with** `UsageError` for options that cannot be. **Called by** `bench.run_prediction`.
"""

from __future__ import annotations

from typing import Any

from shardwise.deploy.options import RunOptions, main_quantization
from shardwise.machines.profile import ClusterProfile, NodeProfile
from shardwise.model.description import ModelDescription
from shardwise.planner.cost_model import DEFAULT_COSTS, CostModel
from shardwise.planner.cost_rates import RuntimeCosts
from shardwise.planner.predict import predict_with
from shardwise.planner.types import Plan, PlanRequest, Prediction, Workload
from shardwise.records import plain, replace


def predict_run(
    model: ModelDescription,
    options: RunOptions,
    node: NodeProfile,
    *,
    prompt_tokens: int,
    output_tokens: int,
    num_users: int = 1,
    costs: RuntimeCosts = DEFAULT_COSTS,
) -> Prediction:
    """All stages on `node`, sharing its cores."""
    options.check(model)
    workload = Workload(
        prompt_tokens=max(1, prompt_tokens),
        output_tokens=max(1, output_tokens),
        num_users=num_users,
        context_tokens=options.context_tokens,
        kv_type=options.kv_type,
        prefill_chunk_tokens=options.chunk(main_quantization(model)),
    )
    shared = replace(node, machine=node.machine or node.name)
    request = PlanRequest(model=model, cluster=ClusterProfile(nodes=(shared,)), workload=workload)
    cost = CostModel(request, replace(costs, stage_threads=options.threads_here(len(options.layer_counts(model)))))
    stages, start = [], 0
    for count in options.layer_counts(model):
        stages.append(cost.whole_stage(cost.unit(node.name, "cpu"), start, start + count, sessions=options.max_sessions))
        start += count
    strategy = "layer_wise" if len(stages) > 1 else "single_node"
    return predict_with(cost, Plan(strategy=strategy, stages=tuple(stages), wire_dtype=options.wire_dtype))


def as_document(found: Prediction) -> dict[str, Any]:
    """Under the names of `run --json`."""
    document: dict[str, Any] = plain(found)
    return document
