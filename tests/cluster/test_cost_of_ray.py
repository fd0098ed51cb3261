"""What Ray costs: decode speed against LocalEngine, interleaved; and how long it takes to place 64 workers."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from shardwise.bench.lab import Host, Lab
from shardwise.clock import SystemClock
from shardwise.cluster import LocalEngine, WorkerSpec, lifecycle
from shardwise.cluster.follow_policy import FollowPolicy
from shardwise.cluster.membership import Member, NodeState
from shardwise.cluster.reconcile import AnyAction, Desired, DesiredWorker, Observed, StartWorker, next_actions
from shardwise.cluster.scheduling import scheduling_of
from shardwise.cluster.state import StateDir
from shardwise.deploy import Deployment, Placement, RunOptions, launch
from shardwise.deploy.following import Follower
from shardwise.deploy.on_cluster import ClusterMembers
from tests.cluster.engine_contract import WORKER
from tests.cluster.hosts import Hosts
from tests.needs import needs_lab

NUM_TOKENS = 200
ROUNDS = 8
ALONE, BESIDE, NO_FOLLOWER, THROUGH = "local, Ray frozen", "local beside Ray", "through Ray, no follower", "through Ray"


class Sample(NamedTuple):
    """One generation."""

    token_s: float  # median between tokens
    stages_s: float  # processor time of the stages a token
    driver_s: float  # of this process a token
    ray_share: float  # of one core, by Ray and the daemons (workers aside)


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """Processor time of all of them until now, to the nanosecond where the system tells."""
    return sum(scheduling_of(process.pid).compute_s for process in processes)


class Bench:
    """A deployment through Ray and one without, of the same stages on the same machine."""

    def __init__(self, home: Hosts, on_ray: Deployment, local: Deployment) -> None:
        self.on_ray, self.local, self._state = on_ray, local, home.state("desk")
        workers = {stage.pid for stage in on_ray.stages}
        pids = {pid for host in ("desk", "nas") for pid in home.pids(host)} - workers
        broker = [p for p in psutil.Process().children() if "shardwise.cluster.ray_engine.broker" in p.cmdline()]
        self.rays = [*map(psutil.Process, sorted(pids)), *broker]

    def measure(self, variant: str) -> Sample:
        """Warm up, then one generation."""
        deployment = self.on_ray if variant in (THROUGH, NO_FOLLOWER) else self.local
        follower = Follower(self.on_ray, ClusterMembers(self._state), FollowPolicy(), SystemClock())
        if variant == THROUGH:
            follower.start()  # as on a cluster
        if variant == ALONE:
            for process in self.rays:
                process.suspend()  # shorter than Ray's health checks wait
        try:
            decode(deployment, 16)
            return self._sample(deployment)
        finally:
            if variant == ALONE:
                for process in self.rays:
                    process.resume()
            if variant == THROUGH:
                follower.close()

    def _sample(self, deployment: Deployment) -> Sample:
        groups = ([psutil.Process(stage.pid) for stage in deployment.stages], [psutil.Process()], self.rays)
        before, started_s = [cpu_s(group) for group in groups], time.perf_counter()
        token_s = decode(deployment, NUM_TOKENS)
        took_s = time.perf_counter() - started_s
        stages_s, driver_s, ray_s = (cpu_s(group) - was for group, was in zip(groups, before, strict=True))
        return Sample(token_s, stages_s / NUM_TOKENS, driver_s / NUM_TOKENS, ray_s / took_s)


def decode(deployment: Deployment, num_tokens: int) -> float:
    """Median seconds between tokens of one generation."""
    times = []
    for _ in deployment.generate("Once upon a time", max_tokens=num_tokens, ignore_eos=True):
        times.append(time.perf_counter())
    return statistics.median(b - a for a, b in itertools.pairwise(times[8:]))


def conditions(pid: int) -> dict[str, str]:
    """What a process runs under, its environment included."""
    process = psutil.Process(pid)
    out = {f"env {name}": value for name, value in process.environ().items()}
    policy = os.sched_getscheduler(pid) if hasattr(os, "sched_getscheduler") else ""
    return out | {
        "niceness": str(process.nice()),
        "scheduling policy": str(policy),
        "threads": str(process.num_threads()),
        "cores": str(process.cpu_affinity() if hasattr(process, "cpu_affinity") else ""),
        "limits": str(process.rlimit(psutil.RLIMIT_NOFILE) if hasattr(process, "rlimit") else ""),
    }


def tell_differences(on_ray: Deployment, local: Deployment) -> None:
    """Print them: whoever finds a cost wants to know."""
    for ours, theirs in zip(on_ray.stages, local.stages, strict=True):
        one, other = conditions(ours.pid), conditions(theirs.pid)
        names = sorted(one.keys() | other.keys())
        print({name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)})


def spread(values: Sequence[float]) -> str:
    """Median, and all between."""
    return f"{statistics.median(values):.4f} ({min(values):.3f} to {max(values):.3f})"


@pytest.mark.bench
@pytest.mark.timeout(240)
def test_decoding_through_ray_costs_at_most_two_percent(home: Hosts) -> None:
    """Interleaved in one run: without Ray (its processes are frozen), beside it, and through it with and without a follower."""
    options = RunOptions(num_stages=2, context_tokens=256, max_sessions=1, probe_interval_s=0.0)
    ray = lifecycle.attach(home.state("desk"))
    address = ray.node_infos()[0].address
    places = [Placement(node="desk", host=address), Placement(node="nas", host=address)]
    # Linux shares the processor among sessions first: a daemon's workers are in one of their own, so these must be, too.
    alone = [Placement(host=address, prefix=("setsid",))] * 2
    found: dict[str, list[Sample]] = {variant: [] for variant in (ALONE, BESIDE, NO_FOLLOWER, THROUGH)}
    with (
        launch("sample", options, engine=ray, placements=places, driver_host=address) as on_ray,
        launch("sample", options, engine=LocalEngine(), placements=alone, driver_host=address) as local,
    ):
        tell_differences(on_ray, local)
        bench = Bench(home, on_ray, local)
        for index in range(ROUNDS):
            turns = [*found][index % 4 :] + [*found][: index % 4]
            for variant in turns if index < ROUNDS // 2 else reversed(turns):
                found[variant].append(bench.measure(variant))
    for variant, samples in found.items():
        pairs = list(zip(samples, found[ALONE], strict=True))
        token_s, stages_s, driver_s, share = (statistics.median(column) for column in zip(*samples, strict=True))
        print(f"{variant:26} {1e3 * token_s:.3f} ms a token, to alone {spread([s.token_s / a.token_s for s, a in pairs])}")
        print(f"    stages {1e3 * stages_s:.3f} ms of processor, to alone {spread([s.stages_s / a.stages_s for s, a in pairs])}")
        print(f"    driver {1e3 * driver_s:.3f} ms of processor; Ray and daemons {100 * share:.2f} % of a core")
    pairs = list(zip(found[THROUGH], found[ALONE], strict=True))
    assert statistics.median(through.stages_s / local.stages_s for through, local in pairs) <= 1.02
    assert statistics.median(through.token_s / local.token_s for through, local in pairs) <= 1.02


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
@needs_lab
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
