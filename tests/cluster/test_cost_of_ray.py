"""What Ray costs: decode speed against LocalEngine, interleaved; and how long it takes to place 64 workers."""

from __future__ import annotations

import itertools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from shardwise.bench.lab import Host, Lab, lab_unavailable
from shardwise.clock import SystemClock
from shardwise.cluster import LocalEngine, WorkerSpec, lifecycle
from shardwise.cluster.following import FollowPolicy
from shardwise.cluster.membership import Member, NodeState
from shardwise.cluster.reconcile import AnyAction, Desired, DesiredWorker, Observed, StartWorker, next_actions
from shardwise.cluster.state import StateDir
from shardwise.deploy import Deployment, Placement, RunOptions, launch
from shardwise.deploy.following import Follower
from shardwise.deploy.on_cluster import ClusterMembers
from tests.cluster.engine_contract import WORKER
from tests.cluster.hosts import Hosts

NUM_TOKENS = 96
ROUNDS = 7


def processor_s(deployment: Deployment) -> float:
    """Processor time of all stages for one generation: what a busy machine cannot distort."""
    times = [psutil.Process(stage.pid).cpu_times() for stage in deployment.stages]
    decode_s(deployment)
    later = [psutil.Process(stage.pid).cpu_times() for stage in deployment.stages]
    return sum(b.user + b.system - a.user - a.system for a, b in zip(times, later, strict=True))


def decode_s(deployment: Deployment) -> float:
    """Median seconds between tokens of one generation."""
    times = []
    for _ in deployment.generate("Once upon a time", max_tokens=NUM_TOKENS, ignore_eos=True):
        times.append(time.perf_counter())
    return statistics.median(b - a for a, b in itertools.pairwise(times[8:]))


@pytest.mark.bench
def test_decoding_through_ray_costs_at_most_two_percent(home: Hosts) -> None:
    options = RunOptions(num_stages=2, context_tokens=256, max_sessions=1, probe_interval_s=0.0)
    ray = lifecycle.attach(home.state("desk"))
    address = ray.node_infos()[0].address
    places = [Placement(node="desk", host=address), Placement(node="nas", host=address)]
    # Linux shares the processor among sessions first: a daemon's workers are in one of their own, so these must be, too.
    alone = [Placement(host=address, prefix=("setsid",))] * 2
    ratios, processor = [], []
    with (
        launch("sample", options, engine=ray, placements=places, driver_host=address) as on_ray,
        launch("sample", options, engine=LocalEngine(), placements=alone, driver_host=address) as local,
    ):
        on_ray.follower = Follower(on_ray, ClusterMembers(home.state("desk")), FollowPolicy(), SystemClock())  # as on a cluster
        on_ray.follower.start()
        for index in range(ROUNDS):
            first, second = (on_ray, local) if index % 2 else (local, on_ray)
            took = {first: decode_s(first), second: decode_s(second)}
            ratios.append(took[on_ray] / took[local])
            spent = {first: processor_s(first), second: processor_s(second)}
            processor.append(spent[on_ray] / spent[local])
    ratio = statistics.median(ratios)
    print(f"inter-token time through Ray / local: median {ratio:.4f} of {[round(r, 3) for r in ratios]}")
    print(f"processor time: median {statistics.median(processor):.4f} of {[round(r, 3) for r in processor]}")
    assert statistics.median(processor) <= 1.02
    assert ratio <= 1.02


def place_64(state: StateDir, num_nodes: int) -> float:
    """Seconds until a plan of 64 workers runs as the pure reconcile says, and nothing is left to do."""
    engine = lifecycle.attach(state)
    try:
        nodes = engine.nodes()
        assert len(nodes) == num_nodes
        wanted = tuple(
            DesiredWorker(name=f"w{i}", node=nodes[i % num_nodes], layers=(i, i + 1), weight_bytes=0) for i in range(64)
        )
        members = tuple(Member(identity=n, name=n, incarnation=1, state=NodeState.READY, since_s=0.0, heard_s=0.0) for n in nodes)

        def actions() -> tuple[AnyAction, ...]:
            observed = Observed(members=members, workers=tuple(engine.statuses()))
            return next_actions(Desired(workers=wanted), observed, consent=False)

        def carry_out(action: AnyAction) -> None:
            assert isinstance(action, StartWorker)
            engine.start(WorkerSpec(name=action.worker.name, node=action.worker.node, module=WORKER, config=b"{}"))

        started_s = time.perf_counter()
        with ThreadPoolExecutor(max_workers=16) as pool:
            list(pool.map(carry_out, actions()))
        took_s = time.perf_counter() - started_s
        assert actions() == ()
        assert {s.node for s in engine.statuses() if s.alive} == set(nodes)
        return took_s
    finally:
        engine.close()


@pytest.mark.soak
def test_ray_places_64_workers_within_a_minute(home: Hosts) -> None:
    took_s = place_64(home.state("desk"), 2)
    print(f"64 workers on two raylets in {took_s:.1f} s")
    assert took_s <= 60


@pytest.mark.soak
@pytest.mark.netns
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(lab_unavailable()), reason=lab_unavailable() or "root on Linux")
def test_ray_places_64_workers_on_eight_hosts_within_a_minute(tmp_path: Path) -> None:
    """Each host a network namespace with a raylet of its own."""
    names = [f"h{i}" for i in range(8)]
    with Lab([Host.on("ethernet_1g", name) for name in names]) as lab:
        hosts = Hosts(tmp_path, lab.prefix)
        try:
            hosts.run(names[0], "cluster", "up", "--name", names[0], "--memory", "256 MiB")
            lines = [hosts.run(names[0], "cluster", "invite")["join"] for _ in names[1:]]
            with ThreadPoolExecutor(max_workers=2) as pool:  # as many as there are cores
                jobs = zip(names[1:], lines, strict=True)
                list(pool.map(lambda job: hosts.paste(*job, "--name", job[0], "--memory", "256 MiB"), jobs))
            code = "from tests.cluster.test_cost_of_ray import place_64\n"
            code += "from shardwise.cluster.state import StateDir\nprint(place_64(StateDir(), 8))"
            took_s = float(hosts.python(names[0], "-c", code))
            print(f"64 workers on eight raylets in {took_s:.1f} s")
            assert took_s <= 60
            hosts.run(names[0], "cluster", "down")
        finally:
            hosts.end()
