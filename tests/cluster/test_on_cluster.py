"""Where a deployment's stages go on a cluster: in turn, as named, and not where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.split_options import split_nodes
from shardwise.cluster import NodeInfo
from shardwise.deploy import RunOptions
from shardwise.deploy.on_cluster import place_stages, plan_nodes, require_node_memory
from shardwise.errors import StageOutOfMemory, UsageError
from shardwise.model import describe_model

NODES = [NodeInfo(name=n, address=f"10.0.0.{i}", memory_bytes=2**30) for i, n in enumerate(("desk", "nas", "pi"), start=1)]


def names(num_stages: int, *nodes: str) -> list[str]:
    return [place.node for place in place_stages(NODES, NODES[1], num_stages, nodes)]


def test_without_names_this_node_comes_first_and_then_the_others_in_turn() -> None:
    assert names(4) == ["nas", "desk", "pi", "nas"]
    assert names(2, "*") == ["nas", "desk"]


def test_named_nodes_are_taken_and_again_in_turn_after_another_split() -> None:
    assert names(2, "pi", "desk") == ["pi", "desk"]
    assert names(3, "pi", "desk") == ["pi", "desk", "pi"]
    assert place_stages(NODES, NODES[0], 1, ("pi",))[0].host == "10.0.0.3"


def test_a_node_that_is_not_up_is_named() -> None:
    with pytest.raises(UsageError, match="not up in the cluster: attic") as caught:
        names(1, "attic")
    assert "desk, nas, pi" in caught.value.hint


def test_a_node_that_is_too_small_is_named_with_bytes() -> None:
    model = describe_model("llama-3-8b:q4_k_m")
    options = RunOptions(layers=(1, 30, 1), nodes=("desk", "nas", "pi"), max_sessions=1, context_tokens=64)
    places = place_stages(NODES, NODES[0], 3, options.nodes)
    with pytest.raises(StageOutOfMemory, match="'nas'") as caught:
        require_node_memory(model, options, places, NODES)
    assert caught.value.details["needed_bytes"] > 2**30 == caught.value.details["available_bytes"]


def test_one_stage_a_named_node() -> None:
    model = describe_model("llama-3-8b:q4_k_m")
    assert len(RunOptions(nodes=("desk", "nas", "pi")).layer_counts(model)) == 3
    assert RunOptions(nodes=("desk", "nas"), layers=(20, 12)).layer_counts(model) == (20, 12)


def test_the_nodes_of_a_plan_file(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(
        json.dumps({"stages": [{"layers": [0, 3], "ranks": [{"node": "nas"}]}, {"layers": [3, 9], "ranks": [{"node": "pi"}]}]})
    )
    assert plan_nodes(plan) == ("nas", "pi")
    assert split_nodes("plan", plan) == ("nas", "pi")
    assert split_nodes("a,b", None) == ("a", "b")
    assert split_nodes("all", None) == ("*",)
    assert split_nodes("", plan) == ()
    with pytest.raises(UsageError, match="without a plan"):
        split_nodes("plan", None)
    plan.write_text("{}")
    with pytest.raises(UsageError, match="cannot read the plan"):
        plan_nodes(plan)
