"""Other planners' rules on the same instances: never better than ours, and each does what its source says."""

from __future__ import annotations

import math

from shardwise.planner import PlanRequest
from shardwise.planner.baselines import BASELINES, byte_greedy, equal, memory_proportional
from shardwise.planner.cost_model import CostModel
from shardwise.planner.objective import objective_forms
from shardwise.planner.problem import build_problem
from shardwise.planner.search_dp import Budget
from shardwise.planner.search_pareto import search_forms
from tests.planner.builders import llama_8b, make_cluster, make_node
from tests.planner.instances import random_request


def test_no_baseline_is_ever_better() -> None:
    beaten = dict.fromkeys(BASELINES, 0)
    for seed in range(40):
        for kind in ("latency", "bottleneck"):
            request = random_request(seed, kind)
            model = CostModel(request)
            (form,) = objective_forms(request.workload, request.objective, len(model.units))
            problem = build_problem(model, form)
            _, ours = search_forms([problem], budget=Budget(math.inf))
            for name, rule in BASELINES.items():
                arrangement = rule(problem)
                if arrangement is None:
                    beaten[name] += 1
                    continue
                layers = [layer for _, start, end in arrangement for layer in range(start, end)]
                assert layers == list(range(request.model.num_layers)), name
                value = problem.value_of(arrangement)
                assert ours.value <= value * (1 + 1e-9), name
                beaten[name] += value > ours.value * (1 + 1e-6)
    assert all(count > 0 for count in beaten.values()), beaten


def test_rules_do_what_their_sources_say() -> None:
    nodes = [make_node("a", memory_gib=4), make_node("b", memory_gib=8), make_node("c", memory_gib=4)]
    request = PlanRequest(model=llama_8b(), cluster=make_cluster(nodes))
    model = CostModel(request)
    problem = build_problem(model, objective_forms(request.workload, request.objective, 3)[0])
    assert memory_proportional(problem) == ((0, 0, 8), (1, 8, 24), (2, 24, 32))
    assert equal(problem) == ((0, 0, 11), (1, 11, 22), (2, 22, 32))
    greedy = byte_greedy(problem)
    assert greedy is not None
    assert len(greedy) == 2
    assert problem.stage_bytes((0, 0, greedy[0][2] + 1)) > problem.limit_bytes[0]
