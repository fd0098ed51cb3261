"""A machine is all of its devices: in the verdict, the alternatives, what is missing, and what paging would mean."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from shardwise.machines.profile import NodeProfile
from shardwise.planner import Advice, Plan, PlanRequest, advise, find_plan, smaller_quantizations
from shardwise.planner.advice_numbers import Situation
from shardwise.planner.cost_model import CostModel
from shardwise.planner.evaluate import plan_value
from shardwise.planner.machine_plans import machine_misses
from shardwise.planner.predict import predict_with
from shardwise.planner.requantize import requantized
from tests.planner.builders import GIB, llama_8b, llama_70b, make_cluster, make_gpu, make_link, make_model, make_node


def desktop(gpu_gib: float = 24.0, memory_gib: float = 24.0) -> NodeProfile:
    return make_node("desktop", memory_gib=memory_gib, bandwidth_gb_s=60, devices=(make_gpu(memory_gib=gpu_gib),))


def home() -> list[NodeProfile]:
    return [
        desktop(),
        make_node("laptop", memory_gib=24, bandwidth_gb_s=100, tflops=2.6),
        make_node("nas", memory_gib=12, bandwidth_gb_s=25, tflops=0.2),
    ]


def ask(nodes: list[NodeProfile], model: Any = None) -> PlanRequest:
    return PlanRequest(model=model or llama_70b(), cluster=make_cluster(nodes))


def words(found: Advice) -> str:
    return "\n".join((found.headline, *(reason.message for reason in found.reasons)))


def test_one_machine_with_a_gpu_does_not_contradict_itself() -> None:
    plan = find_plan(ask([desktop()]))
    assert plan.advice is not None
    assert plan.advice.verdict == "single_node"
    assert {stage.ranks[0].device for stage in plan.stages} == {"cpu", "cuda"}
    text = words(plan.advice)
    assert "cuda" in plan.advice.headline
    assert "cpu" in plan.advice.headline
    assert "from disk" not in text
    assert "split over its devices" not in text
    assert plan.rejections == ()
    stronger = next(reason for reason in plan.advice.reasons if reason.case == "stronger_machine")
    assert "whose cuda had" in stronger.message
    assert "instead of 24 GiB" in stronger.message
    assert stronger.numbers["has_bytes"] == 24 * GIB < stronger.numbers["memory_bytes"]


def test_the_machine_alone_is_an_alternative_with_the_planner_s_own_figures() -> None:
    request = ask(home())
    plan = find_plan(request)
    assert len(plan.nodes) == 2
    alone = find_plan(ask([desktop()]))
    assert alone.predicted is not None
    row = next(option for option in plan.alternatives if option.nodes == ("desktop",) and option.runnable)
    assert row.decode_tokens_per_s == pytest.approx(alone.predicted.decode_tokens_per_s, rel=1e-6)
    assert plan.advice is not None
    assert not any(reason.case == "paging_is_a_cliff" for reason in plan.advice.reasons)
    slower = next(reason for reason in plan.advice.reasons if reason.case == "one_machine_is_slower")
    assert slower.numbers["single_decode_tokens_per_s"] == pytest.approx(row.decode_tokens_per_s)
    assert {rejection.nodes for rejection in plan.rejections} == {("laptop",), ("nas",)}


def test_what_a_machine_is_short_of_makes_it_fit() -> None:
    nodes = [desktop(12, 20)]
    request = ask(nodes)
    short = machine_misses(CostModel(request))["desktop"]
    assert 0 < short < 12 * GIB  # 37 GiB of weights, 32 GiB of memory
    enough = ask([desktop(12, 20 + short / GIB + 0.001)])
    assert machine_misses(CostModel(enough)) == {"desktop": 0}
    assert find_plan(enough).nodes == ("desktop",)
    less = ask([desktop(12, 20 + short / GIB - 0.1)])
    assert machine_misses(CostModel(less))["desktop"] > 0
    found = advise(request)
    assert found.verdict == "add_memory"
    assert found.reasons[0].numbers["short_by_bytes"] == short


def test_paging_fills_the_gpu_first() -> None:
    nodes = [desktop(10, 12), make_node("other", memory_gib=40)]
    request = ask(nodes)
    situation = Situation(CostModel(request), None, [])
    both, without = situation.paged_on("desktop"), Situation(CostModel(ask([make_node("desktop", memory_gib=12)])), None, [])
    alone = without.paged_on("desktop")
    assert both is not None
    assert alone is not None
    paged = sum(stage.weight_bytes for stage in both.stages if stage.paging)
    assert [stage.paging for stage in both.stages] == [False, True]
    assert paged < 0.8 * alone.stages[0].weight_bytes
    assert both.decode_tokens_per_s > 1.2 * alone.decode_tokens_per_s


def test_the_best_split_is_over_machines_and_is_the_best_of_all() -> None:
    nodes = [
        make_node("desk", memory_gib=2, bandwidth_gb_s=60, devices=(make_gpu(memory_gib=0.25),)),
        make_node("nas", memory_gib=2, bandwidth_gb_s=20, tflops=0.2),
        make_node("old", memory_gib=2, bandwidth_gb_s=10, tflops=0.1),
    ]
    model = make_model(6)
    cost = CostModel(PlanRequest(model=model, cluster=make_cluster(nodes, default=make_link(gbit=1, latency_ms=2))))
    found = Situation(cost, None, []).split
    assert found is not None
    assert len(found.plan.nodes) > 1
    values = []
    for count in range(2, len(cost.units) + 1):
        for units in itertools.permutations(cost.units, count):
            for cuts in itertools.combinations(range(1, model.num_layers), count - 1):
                bounds = (0, *cuts, model.num_layers)
                stages = tuple(cost.whole_stage(u, a, b) for u, a, b in zip(units, bounds, bounds[1:]))
                plan = Plan(strategy="layer_wise", stages=stages)
                if len(plan.nodes) > 1:
                    values.append(plan_value(cost, plan))
    assert found.value == pytest.approx(min(values))


def test_a_smaller_quantization_that_fits_one_device_names_it() -> None:
    model = requantized(llama_8b("F16"), "Q8_0")
    plan = find_plan(ask([desktop(7, 16)], model), smaller=smaller_quantizations(model))
    assert len(plan.stages) == 2
    assert plan.advice is not None
    smaller = next(reason for reason in plan.advice.reasons if reason.case == "smaller_quantization_fits_one")
    assert "desktop's cuda alone" in smaller.message
    assert smaller.numbers["decode_tokens_per_s"] > 1.25 * smaller.numbers["split_decode_tokens_per_s"]


def test_a_machine_that_is_left_out_is_told_with_its_fastest_device() -> None:
    nodes = [make_node("strong", memory_gib=80, bandwidth_gb_s=3000, tflops=200), desktop()]
    plan = find_plan(ask(nodes))
    assert plan.nodes == ("strong",)
    assert plan.advice is not None
    idle = next(reason for reason in plan.advice.reasons if reason.case == "better_left_out")
    assert "desktop (936 GB/s)" in idle.message


def test_a_strategy_that_was_not_allowed_is_not_counted() -> None:
    request = PlanRequest(model=llama_70b(), cluster=make_cluster([desktop()]), strategies=("single_node",))
    assert machine_misses(CostModel(request))["desktop"] > 10 * GIB


def test_every_machine_s_miss_is_in_the_words() -> None:
    found = advise(ask([desktop(4, 4), make_node("nas", memory_gib=3), make_node("old", memory_gib=1)]))
    assert found.verdict == "infeasible"
    misses = found.reasons[0].numbers["short_by_bytes_per_node"]
    assert set(misses) == {"desktop", "nas", "old"}
    for name in misses:
        assert f"{name} " in found.headline.partition("short by:")[2]


def test_predictions_of_one_machine_are_those_of_its_plan() -> None:
    request = ask(home())
    model = CostModel(request)
    single = Situation(model, None, []).single
    assert single is not None
    assert predict_with(model, single.plan) == single.predicted
