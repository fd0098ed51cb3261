"""Large clusters: what is proven, what has a gap. Limits are in CPU seconds, so that a busy machine does not matter."""

from __future__ import annotations

import random
import time

import pytest

from shardwise.machines.profile import ClusterProfile
from shardwise.planner import Objective, Plan, PlanRequest, Workload, find_plan
from tests.planner.builders import llama_70b, make_cluster, make_node


def many_nodes(count: int, seed: int, classes: int = 0) -> ClusterProfile:
    """`count` different machines, or machines of so many classes."""
    rng = random.Random(seed)
    kinds = [(rng.uniform(3, 10), rng.uniform(20, 400), rng.uniform(0.2, 30)) for _ in range(classes or count)]
    nodes = [
        make_node(f"n{i}", memory_gib=kind[0], bandwidth_gb_s=kind[1], tflops=kind[2])
        for i in range(count)
        for kind in [kinds[i % len(kinds)]]
    ]
    return make_cluster(nodes)


def timed(cluster: ClusterProfile, kind: str, users: int = 1) -> tuple[Plan, float]:
    request = PlanRequest(model=llama_70b(), cluster=cluster, workload=Workload(num_users=users), objective=Objective(kind=kind))
    started, wall = time.process_time(), time.perf_counter()
    plan = find_plan(request)
    cpu_s, wall_s = time.process_time() - started, time.perf_counter() - wall
    proof = "proven" if plan.optimal else f"gap {plan.gap:.1%}" if plan.gap is not None else "no proof"
    print(f"{len(cluster.nodes)} machines, {kind}, {users} user(s): {wall_s:.2f} s wall, {cpu_s:.2f} s processor, {proof}")
    return plan, cpu_s


@pytest.mark.parametrize("kind", ["latency", "bottleneck"])
def test_80_layers_on_16_machines_are_proven(kind: str) -> None:
    assert timed(many_nodes(16, 1), kind)[0].optimal


@pytest.mark.bench
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["latency", "bottleneck"])
def test_80_layers_on_16_machines_are_proven_in_5_seconds(kind: str, seed: int) -> None:
    plan, seconds = timed(many_nodes(16, seed), kind)
    assert plan.optimal
    assert seconds < 5.0


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["latency", "bottleneck", "throughput"])
def test_80_layers_on_64_machines_in_30_seconds_with_a_gap(kind: str) -> None:
    plan, seconds = timed(many_nodes(64, 1), kind, users=8 if kind == "throughput" else 1)
    assert plan.gap is not None
    assert seconds < 30.0


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "users"), [("latency", 1), ("throughput", 400)])
def test_1000_machines_of_8_classes_in_60_seconds(kind: str, users: int) -> None:
    plan, seconds = timed(many_nodes(1000, 1, classes=8), kind, users)
    assert plan.gap is not None
    assert seconds < 60.0
