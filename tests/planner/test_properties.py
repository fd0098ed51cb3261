"""What must hold for every instance: coverage, memory, never worse than one machine, and monotony."""

from __future__ import annotations

import math

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwise.errors import NoFeasiblePlanError
from shardwise.machines.profile import ClusterProfile, LinkProfile, Measurement
from shardwise.planner import Objective, Plan, PlanRequest, Workload, find_plan, predict
from shardwise.planner.cost_model import CostModel
from shardwise.planner.evaluate import plan_value
from shardwise.records import replace
from tests.planner.builders import make_cluster, make_link, make_model, make_node

KINDS = ("latency", "throughput", "bottleneck", "weighted", "fit")


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    names = "abcd"[: draw(st.integers(1, 4))]
    nodes = [
        make_node(
            name,
            memory_gib=draw(st.floats(0.3, 1.2)),
            bandwidth_gb_s=draw(st.floats(5, 200)),
            tflops=draw(st.floats(0.05, 5)),
            availability=draw(st.floats(0.5, 1)),
        )
        for name in names
    ]
    links = [
        make_link(a, b, gbit=draw(st.floats(0.01, 10)), latency_ms=draw(st.floats(0, 20)))
        for a in names
        for b in names
        if a != b and draw(st.booleans())
    ]
    model = make_model(draw(st.integers(2, 8)), hidden=2048, ffn=5632, vocab=draw(st.sampled_from((1000, 32000))))
    workload = Workload(
        prompt_tokens=draw(st.integers(1, 800)), output_tokens=draw(st.integers(1, 100)), num_users=draw(st.integers(1, 4))
    )
    return PlanRequest(
        model=model,
        cluster=make_cluster(nodes, links),
        workload=workload,
        objective=Objective(kind=draw(st.sampled_from(KINDS)), weight=draw(st.floats(0, 1))),
    )


def plan_of(request: PlanRequest) -> Plan | None:
    try:
        return find_plan(request)
    except NoFeasiblePlanError:
        return None


@settings(max_examples=60, deadline=None)
@given(requests())
def test_every_layer_once_memory_kept_and_never_worse_than_the_best_single_machine(request_: PlanRequest) -> None:
    plan = plan_of(request_)
    assume(plan is not None)
    assert plan is not None
    for stages in plan.pipelines:
        covered = [layer for stage in stages for layer in range(*stage.layers)]
        assert covered == list(range(request_.model.num_layers))
        assert all(stage.layers[0] < stage.layers[1] for stage in stages)
    places = [(r.node, r.device) for stages in plan.pipelines for stage in stages for r in stage.ranks]
    assert len(places) == len(set(places))
    assert all(r.total_bytes <= r.memory_limit_bytes for s in plan.pipelines for stage in s for r in stage.ranks)
    model = CostModel(request_)
    value = plan_value(model, plan)
    if request_.objective.kind != "fit":
        assert math.isclose(value, plan.objective_value, rel_tol=1e-9)
    for unit in model.units:
        alone = Plan(strategy="single_node", stages=(model.whole_stage(unit, 0, request_.model.num_layers),))
        assert value <= plan_value(model, alone) * (1 + 1e-9)
    assert plan.predicted == predict(request_, replace(plan, predicted=None))


def quicker(link: LinkProfile, factor: float) -> LinkProfile:
    return replace(
        link,
        bytes_per_s=Measurement(value=link.bytes_per_s.value * factor),
        latency_s=Measurement(value=link.latency_s.value / factor),
    )


@settings(max_examples=40, deadline=None)
@given(requests(), st.floats(1.0, 10.0), st.integers(0, 3), st.booleans())
def test_a_faster_link_or_more_memory_never_makes_the_optimum_worse(
    request_: PlanRequest, factor: float, index: int, memory: bool
) -> None:
    before = plan_of(request_)
    cluster = request_.cluster
    if memory:
        chosen = cluster.nodes[index % len(cluster.nodes)]
        grown = replace(chosen, memory_bytes=int(chosen.memory_bytes * factor))
        better = replace(cluster, nodes=tuple(grown if n is chosen else n for n in cluster.nodes))
    elif cluster.links:
        chosen_link = cluster.links[index % len(cluster.links)]
        better = replace(cluster, links=tuple(quicker(x, factor) if x is chosen_link else x for x in cluster.links))
    else:
        assert cluster.default_link is not None
        better = ClusterProfile(nodes=cluster.nodes, default_link=quicker(cluster.default_link, factor))
    after = plan_of(replace(request_, cluster=better))
    if before is None:
        return
    assert after is not None
    if request_.objective.kind == "fit":
        assert len(after.stages) <= len(before.stages)
    else:
        assert after.objective_value <= before.objective_value * (1 + 1e-7)
