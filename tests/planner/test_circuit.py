"""The search over subsets against CP-SAT on instances that are too large for the brute force."""

from __future__ import annotations

import math
import random

import pytest

from shardwise.planner import PlanRequest
from shardwise.planner.cost_model import CostModel
from shardwise.planner.objective import objective_forms
from shardwise.planner.problem import build_problem
from shardwise.planner.search_dp import smallest_add
from tests.planner.builders import llama_70b, make_cluster, make_node
from tests.planner.circuit import smallest_add_by_circuit


@pytest.mark.parametrize("seed", range(2))
def test_80_layers_on_7_machines_agree_with_cp_sat(seed: int) -> None:
    rng = random.Random(seed)
    nodes = [
        make_node(f"n{i}", memory_gib=rng.uniform(7, 14), bandwidth_gb_s=rng.uniform(20, 400), tflops=rng.uniform(0.2, 30))
        for i in range(7)
    ]
    request = PlanRequest(model=llama_70b(), cluster=make_cluster(nodes))
    (form,) = objective_forms(request.workload, request.objective, len(nodes))
    problem = build_problem(CostModel(request), form)
    ours = smallest_add(problem, math.inf)
    theirs = smallest_add_by_circuit(problem, math.inf, hint=ours.stages, time_limit_s=40)
    assert ours.exact
    assert theirs.add == pytest.approx(ours.add, rel=1e-5)
    assert theirs.bound <= ours.add * (1 + 1e-6)
