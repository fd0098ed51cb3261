"""Plans say whether anything runs them, and the commands refuse in one line what they cannot carry out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.split_options import split_layers
from shardwise.errors import UsageError
from shardwise.planner import Objective, PlanRequest, Speculation, Workload, find_plan
from shardwise.planner.plan_file import write_plan
from shardwise.planner.types import STRATEGIES, Plan
from shardwise.records import replace
from tests.planner.builders import llama_8b, make_cluster, make_gpu, make_link, make_node


def _two_fast_ones() -> PlanRequest:
    """Two machines whose link is so good that ranks beat stages."""
    nodes = [make_node(name, memory_gib=4, bandwidth_gb_s=20) for name in ("a", "b")]
    cluster = make_cluster(nodes, default=make_link(gbit=400, latency_ms=0.001))
    return PlanRequest(model=llama_8b(), cluster=cluster, workload=Workload(prompt_tokens=64, output_tokens=64))


def test_what_nothing_runs_says_so_and_names_the_best_that_runs(tmp_path: Path) -> None:
    plan = find_plan(replace(_two_fast_ones(), strategies=STRATEGIES))
    assert (plan.strategy, plan.runnable, plan.optimal) == ("tensor_parallel", False, False)
    assert "planned only" in plan.note
    assert "layer_wise on a, b" in plan.note
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    assert json.loads(path.read_text())["runnable"] is False
    with pytest.raises(UsageError, match="cannot be run: 'tensor_parallel'"):
        split_layers("", path)


def test_what_runs_says_nothing(tmp_path: Path) -> None:
    plan = find_plan(_two_fast_ones())
    assert (plan.strategy, plan.runnable, plan.note) == ("layer_wise", True, "")
    assert any(not a.runnable and "planned only" in a.note for a in plan.alternatives)
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    assert sum(split_layers("", path)) == 32


def test_replicas_are_refused_in_one_line(tmp_path: Path) -> None:
    cluster = make_cluster([make_node(f"n{i}", memory_gib=12) for i in range(4)])
    request = PlanRequest(
        model=llama_8b(), cluster=cluster, objective=Objective(kind="throughput"), workload=Workload(num_users=8)
    )
    plan = find_plan(request)
    assert plan.replicas > 1
    assert "start one for each" in plan.note
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    with pytest.raises(UsageError, match=f"{plan.replicas} replicas") as caught:
        split_layers("", path)
    assert "\n" not in caught.value.one_line()


@pytest.mark.parametrize(
    ("wire", "drafts"), [("q8", ()), ("f32", (Speculation(draft_tokens=4, acceptance=0.9, draft_token_s=1e-4),))]
)
def test_wire_dtypes_and_drafts_that_the_runtime_lacks(wire: str, drafts: tuple[Speculation, ...], tmp_path: Path) -> None:
    plan = find_plan(replace(_two_fast_ones(), wire_dtypes=(wire,), speculation=drafts))
    assert not plan.runnable
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    with pytest.raises(UsageError, match="cannot be run"):
        split_layers("", path)


def test_a_small_hand_written_plan_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"stages": [{"layers": [0, 3]}, {"layers": [3, 9]}]}))
    assert split_layers("", path) == (3, 6)
    assert Plan(strategy="layer_wise", stages=()).runnable


def test_graphics_cards_change_nothing_about_that() -> None:
    cluster = make_cluster([make_node("a", memory_gib=16, devices=(make_gpu(), make_gpu())), make_node("b", memory_gib=16)])
    plan = find_plan(PlanRequest(model=llama_8b(), cluster=cluster))
    assert plan.runnable
