"""The simple entry, with every case that the issue names."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import NoFeasiblePlanError
from shardwise.planner import compute_shard_assignment
from tests.planner.builders import make_node


def listed(vram_gb: Any, name: str = "n", **more: Any) -> Any:
    return SimpleNamespace(name=name, listing=SimpleNamespace(vram_gb=vram_gb, **more))


def lengths(num_layers: int, nodes: Any, *args: Any, **kwargs: Any) -> list[int]:
    return [end - start for _, start, end in compute_shard_assignment(num_layers, nodes, *args, **kwargs)]


def test_in_proportion_to_memory() -> None:
    nodes = [listed(24), listed(12), listed(12)]
    assert compute_shard_assignment(32, nodes) == [(nodes[0], 0, 16), (nodes[1], 16, 24), (nodes[2], 24, 32)]


def test_node_profiles_count_their_accelerators() -> None:
    assert lengths(30, [make_node("a", memory_gib=8), make_node("b", memory_gib=16)]) == [10, 20]


def test_one_node_and_no_node() -> None:
    only = listed(8)
    assert compute_shard_assignment(12, [only]) == [(only, 0, 12)]
    assert compute_shard_assignment(12, []) == []
    assert compute_shard_assignment(0, [only]) == [(only, 0, 0)]


def test_identical_nodes_and_the_same_node_twice() -> None:
    node = listed(8)
    assert lengths(10, [listed(8), listed(8), listed(8)]) == [4, 3, 3]
    assert compute_shard_assignment(5, [node, node]) == [(node, 0, 3), (node, 3, 5)]


def test_fewer_layers_than_nodes() -> None:
    assert lengths(2, [listed(1), listed(5), listed(5), listed(1)]) == [0, 1, 1, 0]


def test_generators() -> None:
    assert lengths(4, (listed(g) for g in (1, 1))) == [2, 2]


def test_all_zero_is_an_equal_split_and_one_zero_gets_nothing() -> None:
    assert lengths(7, [listed(0), listed(0)]) == [4, 3]
    assert lengths(7, [listed(0), listed(3)]) == [0, 7]
    assert lengths(7, [listed(0), listed(3)], "balanced") == [0, 7]
    assert lengths(7, [listed(0), listed(3)], "data_parallel") == [0, 7]


@pytest.mark.parametrize("memory", [-1, math.nan, math.inf, -math.inf, "many", None])
def test_memory_that_is_none_names_the_node(memory: Any) -> None:
    with pytest.raises(ValueError, match="'bad'"):
        compute_shard_assignment(4, [listed(4, "good"), listed(memory, "bad")])


def test_an_unknown_strategy_names_the_known_ones() -> None:
    for word in ("layer_wise", "data_parallel", "tensor_parallel", "balanced"):
        with pytest.raises(ValueError, match=word):
            compute_shard_assignment(4, [listed(4)], "layerwise")
    with pytest.raises(ValueError, match="known"):
        compute_shard_assignment(4, [], "other")


@pytest.mark.parametrize("num_layers", [-1, 2.5, True, "3"])
def test_layers_that_are_no_number(num_layers: Any) -> None:
    with pytest.raises(ValueError, match="num_layers"):
        compute_shard_assignment(num_layers, [listed(4)])


@pytest.mark.parametrize("strategy", ["data_parallel", "tensor_parallel"])
def test_everyone_has_every_layer(strategy: str) -> None:
    assert [r[1:] for r in compute_shard_assignment(9, [listed(1), listed(2)], strategy)] == [(0, 9), (0, 9)]


def test_balanced_goes_by_speed_under_memory_caps() -> None:
    fast, slow = listed(4, bandwidth_gbps=300), listed(16, bandwidth_gbps=100)
    assert lengths(16, [fast, slow], "balanced") == [12, 4]
    assert lengths(16, [fast, slow], "balanced", layer_bytes=2**30) == [4, 12]
    assert lengths(16, [listed(4, tflops=1), listed(4, tflops=3)], "balanced") == [4, 12]
    assert lengths(16, [listed(4), listed(12)], "balanced") == [4, 12]
    assert lengths(16, [make_node("a", bandwidth_gb_s=30), make_node("b", bandwidth_gb_s=90)], "balanced") == [4, 12]
    with pytest.raises(NoFeasiblePlanError, match=r"4 of 24 layers find no place: 4 GiB short"):
        compute_shard_assignment(24, [fast, slow], "balanced", layer_bytes=2**30)


@given(
    st.integers(0, 200),
    st.lists(st.floats(0, 1e308) | st.integers(0, 10**6), min_size=1, max_size=12),
    st.sampled_from(["layer_wise", "balanced"]),
)
def test_every_layer_exactly_once(num_layers: int, memory: list[float], strategy: str) -> None:
    nodes = [listed(m, bandwidth=i + 1) for i, m in enumerate(memory)]
    result = compute_shard_assignment(num_layers, nodes, strategy)
    assert [node for node, _, _ in result] == nodes
    covered = [layer for _, start, end in result for layer in range(start, end)]
    assert covered == list(range(num_layers))
    if any(memory):
        assert all(start == end for node, start, end in result if node.listing.vram_gb == 0)
    if strategy == "layer_wise" and any(memory):
        total = sum(m / max(memory) for m in memory)
        for node, start, end in result:
            assert abs((end - start) - num_layers * (node.listing.vram_gb / max(memory)) / total) < 1 + 1e-6
