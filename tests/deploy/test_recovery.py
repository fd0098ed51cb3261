"""Faults on real stage processes: the sentence is finished, token for token."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shardwise.clock import SystemClock
from shardwise.deploy import Deployment, launch_local
from shardwise.errors import SessionLost, UsageError
from shardwise.session.journal import Journal
from shardwise.session.recovery import RecoveryPolicy
from shardwise.session.request import GenerationRequest
from shardwise.transport.messages import SamplingSettings

STAGES, NUM_TOKENS = 3, 40
SETTINGS = {"greedy": SamplingSettings(), "sampled": SamplingSettings(temperature=0.9, top_p=0.95, seed=5)}


@pytest.fixture(scope="module")
def deployment(sample_gguf: Path) -> Iterator[Deployment]:
    with launch_local(sample_gguf, num_stages=STAGES, context_tokens=768, deterministic=True) as built:
        yield built


@pytest.fixture(scope="module")
def undisturbed() -> dict[tuple[str, str], list[int]]:
    """Token ids without a fault, by (prompt, sampling)."""
    return {}


PROMPTS = {"short": "Once upon a time there was a dog", "long": "The quick brown fox jumps over the lazy dog. " * 40}


def request(deployment: Deployment, prompt: str, sampling: str) -> GenerationRequest:
    return GenerationRequest(
        prompt=tuple(deployment.tokenizer.encode(PROMPTS[prompt])),
        max_tokens=NUM_TOKENS,
        sampling=SETTINGS[sampling],
        ignore_eos=True,
    )


def expected(deployment: Deployment, known: dict[tuple[str, str], list[int]], prompt: str, sampling: str) -> list[int]:
    if (prompt, sampling) not in known:
        known[prompt, sampling] = [t.id for t in deployment.stream(request(deployment, prompt, sampling))]
    return known[prompt, sampling]


PHASES = [("long", 0, "greedy"), ("short", 1, "sampled"), ("short", 20, "greedy")]
ALWAYS = {("SIGKILL", 0, 1), ("SIGKILL", 1, 0), ("SIGKILL", 2, 2), ("SIGSTOP", 1, 2)}  # the others: soak
CASES = [
    pytest.param(fault, stage, *PHASES[phase], marks=() if (fault, stage, phase) in ALWAYS else pytest.mark.soak)
    for fault, stage, phase in itertools.product(("SIGKILL", "SIGSTOP"), range(STAGES), range(len(PHASES)))
]


@pytest.mark.parametrize(("fault", "stage", "prompt", "at_token", "sampling"), CASES)
def test_the_same_tokens_after_losing_a_stage(
    deployment: Deployment,
    undisturbed: dict[tuple[str, str], list[int]],
    fault: str,
    stage: int,
    prompt: str,
    at_token: int,
    sampling: str,
) -> None:
    """During prefill (token 0), after the first token, in the middle; killed, and stopped like a closed laptop."""
    wanted = expected(deployment, undisturbed, prompt, sampling)
    before = len(deployment.recoveries)
    stream = deployment.stream(request(deployment, prompt, sampling))
    got = [t.id for t in itertools.islice(stream, at_token)]
    os.kill(deployment.stages[stage].pid, signal.Signals[fault])
    got += [t.id for t in stream]
    assert got == wanted
    # A fault that strikes after the last row has passed costs nothing; every other one is reported.
    for recovery in deployment.recoveries[before:]:
        assert recovery.grade == "exact"
        assert recovery.stall_s > 0


def test_two_stages_at_once(deployment: Deployment, undisturbed: dict[tuple[str, str], list[int]]) -> None:
    wanted = expected(deployment, undisturbed, "short", "greedy")
    stream = deployment.stream(request(deployment, "short", "greedy"))
    got = [t.id for t in itertools.islice(stream, 10)]
    for stage in (0, 2):
        os.kill(deployment.stages[stage].pid, signal.SIGKILL)
    assert got + [t.id for t in stream] == wanted
    assert deployment.stages[0].state == "ready"


def test_a_forbidden_recovery_is_a_lost_session(sample_gguf: Path) -> None:
    policy = RecoveryPolicy(recovery="off")
    with launch_local(sample_gguf, num_stages=2, context_tokens=512, recovery=policy) as built:
        stream = built.generate("Hello", max_tokens=50, ignore_eos=True)
        next(stream)
        os.kill(built.stages[1].pid, signal.SIGKILL)
        with pytest.raises(SessionLost, match=r"stage 1 crashed.*forbids"):
            list(stream)
        assert not built.readiness().ready
        with pytest.raises(SessionLost):
            built.generate("again")


DRIVER = """
import json, sys
from shardwise.deploy import launch_local
with launch_local(sys.argv[1], num_stages=2, context_tokens=512, deterministic=True, journal_dir=sys.argv[2]) as d:
    for token in d.generate("Once upon a time", max_tokens=400, ignore_eos=True, temperature=0.8, seed=3):
        print(json.dumps(token.id), flush=True)
"""


def test_a_restarted_driver_continues_its_sessions(sample_gguf: Path, tmp_path: Path) -> None:
    """SIGKILL the driver in the middle: its workers die with it; a new driver finishes the sentence from the journal."""
    child = start_driver(sample_gguf, tmp_path)
    assert child.stdout is not None
    seen = [json.loads(child.stdout.readline()) for _ in range(30)]
    workers = [p for p in psutil.Process(child.pid).children(recursive=True) if "shardwise" in " ".join(p.cmdline())]
    child.kill()
    child.wait(timeout=10)
    child.stdout.close()
    assert len(workers) >= 2
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    with launch_local(sample_gguf, num_stages=2, context_tokens=512, deterministic=True, journal_dir=str(tmp_path)) as built:
        (session,) = built.unfinished
        assert list(session.generated[:30]) == seen
        rest = [t.id for t in itertools.islice(built.resume(session), 20)]
        whole = built.generate("Once upon a time", max_tokens=400, ignore_eos=True, temperature=0.8, seed=3)
        assert [*session.generated, *rest] == [t.id for t in itertools.islice(whole, len(session.generated) + 20)]
        with pytest.raises(UsageError, match="another process"):
            launch_local(sample_gguf, num_stages=2, context_tokens=512, deterministic=True, journal_dir=str(tmp_path))
    with Journal(tmp_path) as journal:
        assert session.session not in {left.session for left in journal.unfinished}, "it was taken up once"


@pytest.mark.parametrize("seconds", [3, pytest.param(20, marks=pytest.mark.soak)])
def test_a_driver_that_sleeps_goes_on_with_its_sessions(sample_gguf: Path, tmp_path: Path, seconds: int) -> None:
    """SIGSTOP the driver: its own pause is nobody's fault, the tokens are those of a driver that stayed awake meanwhile."""
    asleep, awake = (start_driver(sample_gguf, tmp_path / name, num_tokens=120) for name in ("asleep", "awake"))
    got = [json.loads(asleep.stdout.readline()) for _ in range(20)]  # type: ignore[union-attr]
    asleep.send_signal(signal.SIGSTOP)
    wakes_s = SystemClock().now_s() + seconds
    wanted = all_tokens(awake)
    SystemClock().sleep(max(0.0, wakes_s - SystemClock().now_s()))
    asleep.send_signal(signal.SIGCONT)
    assert got + all_tokens(asleep) == wanted
    assert len(wanted) == 120


def start_driver(model: Path, journal: Path, *, num_tokens: int = 400) -> subprocess.Popen[str]:
    """It prints the ids of its one session."""
    code = DRIVER.replace("max_tokens=400", f"max_tokens={num_tokens}")
    return subprocess.Popen([sys.executable, "-c", code, str(model), str(journal)], stdout=subprocess.PIPE, text=True)


def all_tokens(driver: subprocess.Popen[str]) -> list[int]:
    """Until it ends."""
    assert driver.stdout is not None
    with driver.stdout as lines:
        got = [json.loads(line) for line in lines]
    assert driver.wait(timeout=30) == 0
    return got
