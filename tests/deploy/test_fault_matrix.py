"""The whole matrix of faults, random pairs of them, and what must not be taken for a fault. Soak: an hour on two cores.

The driver's cells that need another driver process (killed, stopped) are in `test_driver_faults.py`.

SHARDWISE_MATRIX_CELLS=12 SHARDWISE_MATRIX_SEED=3 picks 12 cells; SHARDWISE_PAIRS=20 runs 20 pairs, SHARDWISE_FIRST_PAIR=57 begins
at seed 57 (a pair is replayed by its seed, the test's name); SHARDWISE_QUIET_S=60 shortens the watch for false alarms, and
SHARDWISE_BURST_TOKENS=4 SHARDWISE_PAUSE_S=4 makes it a trickle.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.bench.lab import Lab
from shardwise.deploy import Deployment
from shardwise.errors import SessionLost
from shardwise.transport.faults import Fault, FaultPlan
from shardwise.transport.shaping import LinkShape
from tests.deploy.actor import HOSTS, launch_at_home, make_home, places, run_plan
from tests.deploy.faults import Watched, eventually, request, undisturbed
from tests.needs import needs_lab

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(2400),
    needs_lab,
]

SPLIT = (10, 10, 10)
FAULTS = {
    "killed": ("kill", 0.0),
    "stopped 3 s": ("stop", 3.0),
    "stopped 20 s": ("stop", 20.0),
    "cut 6 s": ("cut", 6.0),
    "one way cut 6 s": ("one_way_cut", 6.0),
    "corrupted then killed": ("corrupt_slice", 0.0),
}
PHASES = {"prefill": 0, "token 1": 1, "token 100": 100}
CELLS = list(itertools.product(FAULTS, range(3), PHASES, ("greedy", "sampled"), (1, 4)))
CELLS += itertools.product(("cut 6 s", "one way cut 6 s"), ("driver",), PHASES, ("greedy", "sampled"), (1, 4))
if "SHARDWISE_MATRIX_CELLS" in os.environ:
    chosen = random.Random(int(os.environ.get("SHARDWISE_MATRIX_SEED", "0")))
    CELLS = chosen.sample(CELLS, int(os.environ["SHARDWISE_MATRIX_CELLS"]))
FIRST_PAIR = int(os.environ.get("SHARDWISE_FIRST_PAIR", "0"))
PAIRS = range(FIRST_PAIR, FIRST_PAIR + int(os.environ.get("SHARDWISE_PAIRS", "200")))
QUIET_S = float(os.environ.get("SHARDWISE_QUIET_S", "1800"))
BURST_TOKENS = int(os.environ.get("SHARDWISE_BURST_TOKENS", "30"))
PAUSE_S = float(os.environ.get("SHARDWISE_PAUSE_S", "2"))
NUM_TOKENS = {"prefill": 16, "token 1": 24, "token 100": 112}


@pytest.fixture(scope="module")
def home() -> Iterator[Lab]:
    with make_home() as lab:
        yield lab


@pytest.fixture(scope="module")
def deployment(home: Lab, sample_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    cache = str(tmp_path_factory.mktemp("cache"))
    with launch_at_home(
        home, sample_gguf, context_tokens=768, deterministic=True, cache_dir=cache, probe_interval_s=2.0
    ) as built:
        assert built.supervisor is not None
        built.supervisor.on_change = lambda what: print("  supervisor:", what)
        yield built


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, str, int], list[int]]:
    return {}


@pytest.fixture
def healthy(home: Lab, deployment: Deployment) -> Deployment:
    """Ready, and split as at the beginning."""
    assert deployment.driver.failure is None, deployment.driver.failure
    eventually(lambda: deployment.driver.connected and not deployment.driver.recovering, "standing again")
    if tuple(s.node for s in deployment.stages) != HOSTS:
        deployment.relayout(SPLIT, places(home))
    return deployment


def run(home: Lab, deployment: Deployment, plan: FaultPlan, sessions: list[Watched], wanted: list[list[int]]) -> None:
    before = len(deployment.recoveries)
    run_plan(home, deployment, plan, sessions)
    got = [session.ids() for session in sessions]
    for recovery in deployment.recoveries[before:]:
        print(f"  {recovery.cause[:60]}: {recovery.action}, stall {recovery.stall_s:.1f} s ({recovery.predicted_stall_s:.1f})")
        assert recovery.grade == "exact"
    assert got == wanted
    eventually(lambda: kv_is_free(deployment), "freeing the KV")


def kv_is_free(deployment: Deployment) -> bool:
    if not deployment.driver.connected or deployment.driver.recovering:
        return False
    return all(s.sessions == 0 for s in deployment.stats())


@pytest.mark.parametrize(("fault", "stage", "phase", "sampling", "num_sessions"), CELLS)
def test_the_matrix(
    home: Lab,
    healthy: Deployment,
    known: dict[tuple[str, str, int], list[int]],
    fault: str,
    stage: int | str,
    phase: str,
    sampling: str,
    num_sessions: int,
) -> None:
    kind, duration_s = FAULTS[fault]
    prompt = "long" if phase == "prefill" else "short"
    wanted = request(healthy, prompt=prompt, sampling=sampling, num_tokens=NUM_TOKENS[phase])
    key = (prompt, sampling, NUM_TOKENS[phase])
    if key not in known:
        known[key] = undisturbed(healthy, wanted)
    at_token = PHASES[phase]
    strike = Fault(  # type: ignore[arg-type]
        kind=kind,
        target=stage if stage == "driver" else f"stage-{stage}",
        in_prefill=not at_token,
        at_token=at_token or None,
        duration_s=duration_s,
    )
    sessions = [Watched(healthy, wanted) for _ in range(num_sessions)]
    run(home, healthy, FaultPlan(faults=(strike,)), sessions, [known[key]] * num_sessions)


@pytest.mark.parametrize("seed", PAIRS)
def test_random_pairs(home: Lab, healthy: Deployment, known: dict[tuple[str, str, int], list[int]], seed: int) -> None:
    plan = FaultPlan.draw(seed, ["stage-0", "stage-1", "stage-2"], num_tokens=60)
    print(f"seed {seed}:", "; ".join(fault.describe() for fault in plan.faults))
    sampling = ("greedy", "sampled")[seed % 2]
    wanted = request(healthy, sampling=sampling, num_tokens=80)
    key = ("short", sampling, 80)
    if key not in known:
        known[key] = undisturbed(healthy, wanted)
    sessions = [Watched(healthy, wanted) for _ in range(1 + seed % 3)]
    try:
        run(home, healthy, plan, sessions, [known[key]] * len(sessions))
    except SessionLost as lost:
        pytest.fail(f"seed {seed} lost a session: {lost}")


def test_no_false_alarm_on_a_bad_link(home: Lab, healthy: Deployment) -> None:
    """100 ms of jitter and 2 % loss both ways on one host."""
    bad = LinkShape(jitter_s=0.1, jitter_kind="uniform", loss=0.02)
    home.set_access("nas", up=bad, down=bad)
    try:
        assert watch_quietly(healthy, QUIET_S) == []
    finally:
        home.set_access("nas", up=LinkShape(), down=LinkShape())


def burn() -> None:
    while True:
        pass


def test_no_false_alarm_while_another_process_takes_the_whole_cpu(healthy: Deployment) -> None:
    context = multiprocessing.get_context("spawn")
    burners = [context.Process(target=burn, daemon=True) for _ in range(2 * (os.cpu_count() or 1))]
    for burner in burners:
        burner.start()
    try:
        assert watch_quietly(healthy, min(QUIET_S, 120.0)) == []
    finally:
        for burner in burners:
            burner.kill()
            burner.join()


def watch_quietly(deployment: Deployment, seconds: float) -> list[str]:
    """What the supervisor said during so many seconds of generation and of silence in turn."""
    assert deployment.supervisor is not None
    said: list[str] = []
    before, deployment.supervisor.on_change = deployment.supervisor.on_change, said.append
    clock = deployment.driver.clock
    end_s, num_tokens, most_silent_s = clock.now_s() + seconds, 0, 0.0
    while clock.now_s() < end_s:
        assert len(undisturbed(deployment, request(deployment, num_tokens=BURST_TOKENS))) == BURST_TOKENS
        num_tokens += BURST_TOKENS
        resumes_s = clock.now_s() + PAUSE_S
        while clock.now_s() < resumes_s:
            heard_s = min(deployment.driver.heard_s.values())
            most_silent_s = max(most_silent_s, deployment.driver.looked_s - heard_s)
            deployment.driver.wait_changed(0.1)
    deployment.supervisor.on_change = before
    print(f"{num_tokens} tokens in {seconds:.0f} s; longest silence seen between bursts {most_silent_s:.2f} s; said: {said}")
    return said
