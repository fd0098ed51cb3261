"""What Ray costs: decode speed against LocalEngine, interleaved; and how long it takes to place 64 workers."""

from __future__ import annotations

import itertools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from shardwise.cluster import LocalEngine, WorkerSpec, lifecycle
from shardwise.deploy import Deployment, Placement, RunOptions, launch
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


@pytest.mark.soak
def test_ray_places_64_workers_within_a_minute(home: Hosts) -> None:
    engine = lifecycle.attach(home.state("desk"))
    try:
        nodes = engine.nodes()
        specs = [WorkerSpec(name=f"w{i}", node=nodes[i % len(nodes)], module=WORKER, config=b"{}") for i in range(64)]
        started_s = time.perf_counter()
        with ThreadPoolExecutor(max_workers=16) as pool:
            list(pool.map(engine.start, specs))
        alive = [s for s in engine.statuses() if s.alive]
        took_s = time.perf_counter() - started_s
        print(f"64 workers in {took_s:.1f} s")
        assert len(alive) == 64
        assert took_s <= 60
    finally:
        engine.close()
