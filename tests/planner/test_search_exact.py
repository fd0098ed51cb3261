"""The search against a brute force: 1,000 random small instances for latency and for bottleneck, fewer for the rest.

A part of them by default, all with `-m "soak or not soak"`.
"""

from __future__ import annotations

import math

import pytest

from shardwise.planner.cost_model import CostModel
from shardwise.planner.objective import objective_forms
from shardwise.planner.problem import build_problem
from shardwise.planner.search_dp import Budget
from shardwise.planner.search_pareto import search_forms
from tests.planner.instances import BruteForce, random_request

INSTANCES = {"latency": 1000, "bottleneck": 1000, "throughput": 200, "weighted": 150, "fit": 150}
DEFAULT = {"latency": 250, "bottleneck": 250, "throughput": 60, "weighted": 50, "fit": 50}
CASES = [pytest.param(kind, range(num)) for kind, num in DEFAULT.items()] + [
    pytest.param(kind, range(DEFAULT[kind], num), marks=pytest.mark.soak) for kind, num in INSTANCES.items()
]


@pytest.mark.parametrize(("kind", "seeds"), CASES)
def test_always_optimal(kind: str, seeds: range) -> None:
    infeasible = 0
    for seed in seeds:
        request = random_request(seed, kind)
        model = CostModel(request)
        forms = objective_forms(request.workload, request.objective, len(model.units))
        problems = [build_problem(model, form) for form in forms]
        at, found = search_forms(problems, budget=Budget(math.inf))
        if found.stages:
            assert found.optimal
            assert problems[at].value_of(found.stages) == found.value
        expected = BruteForce(request).best()
        infeasible += math.isinf(expected)
        assert found.value == pytest.approx(expected, rel=1e-7), f"seed {seed}"
    assert infeasible < len(seeds) / 2
