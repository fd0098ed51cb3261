"""Plans keep to the cuts that an architecture allows: `run` would refuse any other."""

from __future__ import annotations

import itertools

import pytest

from shardwise.errors import NoFeasiblePlanError
from shardwise.model.description import ModelDescription
from shardwise.model.families import FAMILIES, allowed_stage
from shardwise.model.presets import describe_preset
from shardwise.planner import Objective, PlanRequest, Workload, find_plan
from shardwise.planner.cuts import boundaries, limits_cuts
from shardwise.records import replace
from tests.planner.builders import GIB, llama_8b, make_cluster, make_node


def _with(model: ModelDescription, architecture: str) -> ModelDescription:
    return replace(model, architecture=architecture)


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_every_run_between_two_boundaries_can_be_a_stage(architecture: str) -> None:
    model = _with(llama_8b(), architecture)
    found = boundaries(model)
    assert (found[0], found[-1]) == (0, model.num_layers)
    assert all(allowed_stage(model, a, b) for a, b in itertools.combinations(found, 2))


def test_models_without_a_pattern_may_be_cut_anywhere() -> None:
    assert not limits_cuts(llama_8b())
    assert not limits_cuts(_with(llama_8b(), "an architecture of tomorrow"))


def test_a_slice_of_gemma_3_has_a_layer_with_a_window() -> None:
    model = describe_preset("gemma-3-12b", "Q4_K_M")
    assert limits_cuts(model)
    cluster = make_cluster([make_node(f"n{i}", memory_gib=3) for i in range(6)])
    plan = find_plan(PlanRequest(model=model, cluster=cluster, objective=Objective(kind="throughput")))
    assert len(plan.stages) > 2
    assert all(allowed_stage(model, *stage.layers) for stage in plan.stages)
    assert [s.layers[0] for s in plan.stages[1:]] == [s.layers[1] for s in plan.stages[:-1]]
    assert "gemma3 allows" in plan.method


@pytest.mark.parametrize("kind", ["latency", "throughput", "fit"])
def test_hybrid_models_are_cut_between_whole_blocks(kind: str) -> None:
    model = describe_preset("qwen3-next-80b-a3b", "Q4_K_M")
    cluster = make_cluster([make_node(f"n{i}", memory_gib=16) for i in range(8)])
    workload = Workload(num_users=4)
    plan = find_plan(PlanRequest(model=model, cluster=cluster, objective=Objective(kind=kind), workload=workload))
    for stages in plan.pipelines:
        assert all(allowed_stage(model, *stage.layers) for stage in stages)
        assert (stages[0].layers[0], stages[-1].layers[1]) == (0, model.num_layers)


def test_forbidden_lengths_leave_small_blocks() -> None:
    found = boundaries(describe_preset("deepseek-v3", "Q4_K_M"))
    assert max(b - a for a, b in itertools.pairwise(found)) <= 4


def test_a_model_that_cannot_be_cut_fits_one_machine_or_nowhere() -> None:
    family = next(f for f in FAMILIES.values() if f.fixed_from_layers is not None or f.fixed_layer_counts)
    total = family.fixed_layer_counts[0] if family.fixed_layer_counts else int(family.fixed_from_layers or 0)
    base = llama_8b()
    model = replace(_with(base, family.architecture), layers=tuple(base.layers[i % 32] for i in range(total)))
    assert boundaries(model) == (0, total)
    size = model.stage_weight_bytes(0, total) / GIB
    one = make_cluster([make_node("big", memory_gib=2 * size), make_node("small", memory_gib=size / 2)])
    assert find_plan(PlanRequest(model=model, cluster=one)).strategy == "single_node"
    many = make_cluster([make_node(f"n{i}", memory_gib=size / 2) for i in range(6)])
    with pytest.raises(NoFeasiblePlanError, match="cannot be cut"):
        find_plan(PlanRequest(model=model, cluster=many))
