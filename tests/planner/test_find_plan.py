"""The front door: strategies, limits, rejections, contradictions, and the shape of the JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import NoFeasiblePlanError, UsageError
from shardwise.planner import (
    Limits,
    Objective,
    Plan,
    PlanRequest,
    Speculation,
    Workload,
    find_plan,
    smaller_quantizations,
)
from shardwise.planner.plan_file import load_plan, write_plan
from shardwise.planner.types import STRATEGIES
from shardwise.records import plain, to_json
from tests.planner.builders import GIB, llama_8b, llama_70b, make_cluster, make_gpu, make_link, make_model, make_node


def ask(model: Any, nodes: list[Any], default: Any = None, **more: Any) -> PlanRequest:
    return PlanRequest(model=model, cluster=make_cluster(nodes, default=default), **more)


def test_one_strong_machine_is_left_alone() -> None:
    plan = find_plan(ask(llama_8b(), [make_node("desk", memory_gib=32, devices=(make_gpu(),)), make_node("nas")]))
    assert plan.strategy == "single_node"
    assert plan.stages[0].ranks[0].device == "cuda"
    assert plan.optimal
    assert plan.gap == 0.0


def test_a_model_that_fits_nowhere_alone_is_split() -> None:
    plan = find_plan(ask(llama_70b(), [make_node(f"n{i}", memory_gib=16) for i in range(4)]))
    assert plan.strategy == "layer_wise"
    assert len(plan.stages) == 4
    assert {r.nodes for r in plan.rejections} == {(f"n{i}",) for i in range(4)}
    assert all(r.short_by_bytes > 20 * GIB for r in plan.rejections)


def test_order_follows_the_links() -> None:
    links = [make_link(a, b, gbit=0.01, latency_ms=50) for a, b in (("a", "c"), ("c", "a"), ("b", "a"), ("c", "b"))]
    cluster = make_cluster([make_node(n, memory_gib=2.0) for n in "abc"], links, make_link(gbit=10, latency_ms=0.1))
    request = PlanRequest(model=llama_8b(), cluster=cluster, workload=Workload(prompt_tokens=16, output_tokens=64))
    assert find_plan(request).nodes == ("a", "b", "c")


def test_throughput_makes_copies_where_they_pay() -> None:
    nodes = [make_node(f"n{i}", memory_gib=8) for i in range(4)]
    slow = make_link(gbit=0.05, latency_ms=30)
    request = ask(llama_8b(), nodes, slow, workload=Workload(num_users=4), objective=Objective(kind="throughput"))
    plan = find_plan(request)
    assert plan.strategy == "data_parallel"
    assert plan.replicas == 4
    assert len(plan.replica_stages) == 3
    assert plan.advice is not None
    assert plan.advice.verdict == "single_node"


def test_every_strategy_can_be_asked_for() -> None:
    nodes = [make_node(f"n{i}", memory_gib=8) for i in range(3)]
    quick = make_link(gbit=40, latency_ms=0.01)
    sparse = make_model(12, hidden=2048, ffn=1024, experts=(64, 8))
    for strategy in ("single_node", "layer_wise", "tensor_parallel", "expert_parallel", "disaggregated"):
        plan = find_plan(ask(sparse, nodes, quick, strategies=(strategy,)))
        assert plan.strategy == strategy
        assert plan.predicted is not None
        assert plan.predicted.decode_tokens_per_s > 0


def test_tensor_parallel_has_uneven_shares_and_expert_parallel_places_experts() -> None:
    nodes = [make_node("fast", bandwidth_gb_s=150), make_node("slow", bandwidth_gb_s=50)]
    quick = make_link(gbit=40, latency_ms=0.01)
    tensor = find_plan(ask(llama_8b(), nodes, quick, strategies=("tensor_parallel",)))
    assert [r.share for r in tensor.stages[0].ranks] == [0.75, 0.25]
    sparse = make_model(12, hidden=2048, ffn=1024, experts=(64, 8))
    expert = find_plan(ask(sparse, nodes, quick, strategies=("expert_parallel",)))
    ranges = [r.experts for r in expert.stages[0].ranks]
    assert ranges[0] == (0, 48)
    assert ranges[1] == (48, 64)


def test_two_gpus_in_one_machine_give_a_hybrid() -> None:
    gpu = make_gpu(memory_gib=12)
    nodes = [make_node("twin", memory_gib=1, devices=(gpu, gpu)), make_node("other", memory_gib=30)]
    plan = find_plan(ask(llama_70b(), nodes, strategies=STRATEGIES))
    assert sum(stage.layers[1] - stage.layers[0] for stage in plan.stages) == 80


def test_wire_dtype_and_drafts_are_chosen_when_they_help() -> None:
    nodes = [make_node("a", memory_gib=3.5), make_node("b", memory_gib=3.5)]
    slow = make_link(gbit=0.02, latency_ms=30)
    draft = Speculation(draft_tokens=4, acceptance=0.8, draft_token_s=2e-3)
    plan = find_plan(ask(llama_8b(), nodes, slow, wire_dtypes=("f32", "f16"), speculation=(draft,)))
    assert plan.wire_dtype == "f16"
    assert plan.speculation == draft


def test_limits_are_kept_or_named() -> None:
    nodes = [make_node("a", memory_gib=8, availability=0.9), make_node("b", memory_gib=8, availability=0.99)]
    plan = find_plan(ask(llama_8b(), nodes, limits=Limits(min_availability=0.95)))
    assert plan.nodes == ("b",)
    assert len(find_plan(ask(llama_8b(), nodes, limits=Limits(max_stages=1))).stages) == 1
    with pytest.raises(NoFeasiblePlanError, match="p95 between tokens") as caught:
        find_plan(ask(llama_8b(), nodes, limits=Limits(max_inter_token_p95_s=1e-3)))
    assert caught.value.exit_code == 3


def test_nothing_fits_tells_the_nearest_miss_of_every_machine() -> None:
    with pytest.raises(NoFeasiblePlanError) as caught:
        find_plan(ask(llama_70b(), [make_node("a", memory_gib=8), make_node("b", memory_gib=16)]))
    details = caught.value.details
    assert details["nearest_miss"]["node"] == "b"
    missing = details["short_by_bytes_per_node"]
    assert missing["a"] - missing["b"] == 8 * GIB
    assert details["rejections"][-1]["strategy"] == "layer_wise"
    assert details["rejections"][-1]["short_by_bytes"] > 10 * GIB
    assert "short" in caught.value.one_line()


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"workload": Workload(prompt_tokens=8000, output_tokens=500)}, "beyond the 8192"),
        ({"workload": Workload(context_tokens=100)}, "cannot hold"),
        ({"workload": Workload(kv_type="f17")}, "kv_type"),
        ({"workload": Workload(num_users=0)}, "num_users"),
        ({"workload": Workload(prompt_tokens=0)}, "prompt_tokens"),
        ({"objective": Objective(kind="latencey")}, "objective"),
        ({"objective": Objective(weight=2.0)}, "weight"),
        ({"wire_dtypes": ("f8",)}, "wire_dtype"),
        ({"strategies": ("pipeline",)}, "strategy"),
        ({"limits": Limits(memory_fraction=0.0)}, "memory_fraction"),
    ],
)
def test_contradictions_are_usage_errors(more: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        find_plan(ask(llama_8b(), [make_node("a")], **more))


def test_the_json_has_the_agreed_names_and_reads_back(tmp_path: Path) -> None:
    request = ask(llama_70b(), [make_node(f"n{i}", memory_gib=16) for i in range(4)])
    plan = find_plan(request, smaller=smaller_quantizations(request.model))
    document = json.loads(to_json(plan))
    agreed = "strategy stages replicas speculation wire_dtype predicted optimal gap alternatives rejections advice"
    assert set(agreed.split()) <= set(document)
    rank = document["stages"][0]["ranks"][0]
    assert {"node", "device", "share", "weight_bytes", "kv_bytes", "workspace_bytes", "memory_limit_bytes"} <= set(rank)
    predicted = document["predicted"]
    wanted = "time_to_first_token_s inter_token_s decode_tokens_per_s aggregate_tokens_per_s boundaries bottleneck stages"
    assert set(wanted.split()) <= set(predicted)
    assert {"p50", "p95"} <= set(predicted["inter_token_s"])
    hop = predicted["boundaries"][0]
    assert {"from", "to", "tensor", "bytes_per_token", "transfer_s", "copy_s", "sync_wait_s"} <= set(hop)
    stage = predicted["stages"][0]
    assert {"node", "layers", "weight_bytes", "kv_bytes", "peak_memory_bytes", "compute_s", "wait_s"} <= set(stage)
    assert {"verdict", "headline", "reasons"} <= set(document["advice"])
    write_plan(plan, tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert isinstance(again, Plan)
    assert plain(again) == plain(plan)


def test_the_same_request_gives_the_same_plan() -> None:
    request = ask(llama_70b(), [make_node(f"n{i}", memory_gib=16) for i in range(4)], make_link(jitter_ms=5))
    assert find_plan(request) == find_plan(request)
