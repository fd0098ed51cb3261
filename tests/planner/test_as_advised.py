"""The plan that is shown is the one that is advised; a split that makes tokens slower needs a reason that is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.main import run
from shardwise.planner import Limits, Objective, Plan, PlanRequest, Workload, consult, find_plan
from shardwise.planner.advice_machines import WORTH_SLOWER_TOKENS
from shardwise.records import replace
from tests.planner.builders import llama_8b, make_cluster, make_link, make_model, make_node

HOME = Path(__file__).parents[2] / "examples" / "home.toml"


def cases(plan: Plan) -> dict[str, dict[str, object]]:
    assert plan.advice is not None
    return {reason.case: reason.numbers for reason in plan.advice.reasons}


def test_the_coarser_split_is_shown_written_and_reasoned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    arguments = ["plan", "llama-3-70b:q4_k_m", "--cluster", str(HOME), "--json"]
    assert run([*arguments, "--out", str(out)]) == 0
    document = json.loads(capsys.readouterr().out)
    advice = document["advice"]
    assert advice["verdict"] == "coarser_split"
    reasons = {reason["case"]: reason["numbers"] for reason in advice["reasons"]}
    stages = document["stages"]
    assert len(stages) == reasons["coarser_is_as_fast"]["num_stages"] == len(document["predicted"]["stages"])
    assert json.loads(out.read_text())["stages"] == stages
    assert [row["layers"] for row in reasons["no_spare_copy"]["replica_bytes"]] == [stage["layers"] for stage in stages]
    assert len(document["alternatives"][0]["layers"]) == reasons["coarser_is_as_fast"]["finer_num_stages"]
    assert document["optimal"] is False
    assert 0 < document["gap"] < 0.05
    assert run([*arguments, "--best"]) == 0
    best = json.loads(capsys.readouterr().out)
    assert len(best["stages"]) == reasons["coarser_is_as_fast"]["finer_num_stages"]
    assert best["optimal"] is True
    assert best["objective_value"] < document["objective_value"]
    assert run(["advise", *arguments[1:]]) == 0
    assert json.loads(capsys.readouterr().out)["stages"] == stages


def test_the_machine_that_is_as_good_is_the_plan() -> None:
    request = PlanRequest(model=llama_8b(), cluster=make_cluster([make_node("a"), make_node("b", bandwidth_gb_s=30)]))
    best = find_plan(request)
    plan, advice, _ = consult(request)
    assert plan is not None
    assert advice.verdict == "single_node"
    assert len(best.nodes) == 2
    assert plan.nodes == (cases(plan)["one_machine_is_as_good"]["node"],)
    assert plan.strategy == "single_node"
    assert "no_spare_copy" not in cases(plan)
    assert plan.alternatives[0].nodes == best.nodes
    assert plan == find_plan(request, as_advised=True)


def test_a_plan_that_breaks_a_limit_or_was_not_allowed_is_not_advised() -> None:
    request = PlanRequest(model=llama_8b(), cluster=make_cluster([make_node("a"), make_node("b", bandwidth_gb_s=30)]))
    alone, split = find_plan(replace(request, strategies=("single_node",))), find_plan(request)
    assert alone.predicted is not None
    assert split.predicted is not None
    first = split.predicted.time_to_first_token_s
    assert first < alone.predicted.time_to_first_token_s
    limits = Limits(max_time_to_first_token_s=(first + alone.predicted.time_to_first_token_s) / 2)
    for asked in (replace(request, limits=limits), replace(request, strategies=("layer_wise",))):
        found = find_plan(asked, as_advised=True)
        assert len(found.nodes) == 2
        assert "one_machine_is_as_good" not in cases(found)


def two(latency_ms: float, prompt_tokens: int = 512, kind: str = "latency", users: int = 1) -> PlanRequest:
    """Two equal machines and a small model: prompts gain by a split, tokens lose."""
    nodes = [make_node(name, bandwidth_gb_s=40, tflops=0.3) for name in "ab"]
    workload = Workload(prompt_tokens=prompt_tokens, output_tokens=128, num_users=users)
    model = make_model(30, hidden=576, ffn=1536, heads=9, kv_heads=3, quantization="Q4_1")
    cluster = make_cluster(nodes, default=make_link(gbit=1, latency_ms=latency_ms))
    return PlanRequest(model=model, cluster=cluster, workload=workload, objective=Objective(kind=kind))


def test_slower_tokens_that_pay_say_why() -> None:
    plan = find_plan(two(0.1), as_advised=True)
    assert plan.advice is not None
    assert plan.advice.verdict == "shard"
    numbers = cases(plan)["one_machine_is_slower"]
    single, split = numbers["single_decode_tokens_per_s"], numbers["plan_decode_tokens_per_s"]
    assert isinstance(single, float)
    assert isinstance(split, float)
    assert split < single
    assert numbers["plan_time_to_first_token_s"] < numbers["single_time_to_first_token_s"]  # type: ignore[operator]
    assert numbers["plan_request_s"] < numbers["single_request_s"] / (1 + WORTH_SLOWER_TOKENS)  # type: ignore[operator]
    assert f"({single:.1f} a second)" in plan.advice.headline
    assert "the whole request" in plan.advice.headline


@pytest.mark.parametrize("kind", ["latency", "throughput", "weighted"])
@pytest.mark.parametrize("latency_ms", [0.1, 0.3, 0.5, 0.7, 0.9, 1.2])
@pytest.mark.parametrize("prompt_tokens", [64, 256, 512])
def test_never_a_split_with_slower_tokens_and_little_gain(kind: str, latency_ms: float, prompt_tokens: int) -> None:
    request = two(latency_ms, prompt_tokens, kind, users=1 if kind == "latency" else 2)
    plan = find_plan(request, as_advised=True)
    alone = find_plan(replace(request, strategies=("single_node",)))
    assert plan.advice is not None
    assert plan.predicted is not None
    assert alone.predicted is not None
    if len(plan.nodes) == 1 or plan.replicas > 1 or plan.predicted.decode_tokens_per_s >= alone.predicted.decode_tokens_per_s:
        return
    assert plan.advice.verdict != "single_node"
    if kind == "latency":
        assert plan.predicted.request_s * (1 + WORTH_SLOWER_TOKENS) < alone.predicted.request_s
    else:
        assert plan.predicted.aggregate_tokens_per_s > (1 + WORTH_SLOWER_TOKENS) * alone.predicted.aggregate_tokens_per_s


def test_slower_tokens_and_little_gain_is_not_split() -> None:
    found = [find_plan(two(latency_ms)) for latency_ms in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)]
    kept = [plan for plan in found if "one_machine_is_as_good" in cases(plan)]
    weighed = [cases(plan)["one_machine_is_as_good"] for plan in kept]
    gains = [row for row in weighed if row["gain"] > 0.05]  # type: ignore[operator]
    assert gains, "some link loses only because tokens come slower"
    for plan in kept:
        assert plan.advice is not None
        assert plan.advice.verdict == "single_node"
        assert "gives slower tokens" in plan.advice.headline
