"""The page on planning: its cluster file loads, its verdicts and words are those of the program."""

from __future__ import annotations

import re
from pathlib import Path

from shardwise.machines import load_cluster
from shardwise.model.presets import describe_preset
from shardwise.planner import PlanRequest, find_plan
from shardwise.planner.advice import VERDICTS
from shardwise.planner.types import OBJECTIVES

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")


def test_the_cluster_file_of_the_page_can_be_planned_with(tmp_path: Path) -> None:
    found = re.search(r"```toml\n(.*?)```", PAGE, re.S)
    assert found is not None
    path = tmp_path / "home.toml"
    path.write_text(found[1], encoding="utf-8")
    plan = find_plan(PlanRequest(model=describe_preset("llama-3-70b", "Q4_K_M"), cluster=load_cluster(path)))
    assert set(plan.nodes) <= {"desktop", "macbook", "nas"}
    assert len(plan.stages) > 1


def test_all_verdicts_and_objectives_are_on_the_page() -> None:
    for word in (*{verdict for _, verdict in VERDICTS}, "shard", *OBJECTIVES):
        assert re.search(rf"`?\b{word}\b", PAGE), word
