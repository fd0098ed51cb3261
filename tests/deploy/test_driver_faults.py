"""The driver's column of the matrix: it is killed and another one goes on from the journal; it is stopped and goes on itself.

Drivers are processes of their own. Soak.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from shardwise.clock import SystemClock
from shardwise.deploy import launch_local
from shardwise.session.request import GenerationRequest
from tests.deploy.faults import PROMPTS, SETTINGS

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600), pytest.mark.skipif(sys.platform == "win32", reason="signals")]

PHASES = {"prefill": ("long", 0, 16), "token 1": ("short", 1, 24), "token 100": ("short", 100, 140)}
DRIVER = """
import json, sys, threading
from shardwise.deploy import launch_local
from shardwise.session.request import GenerationRequest
from tests.deploy.faults import PROMPTS, SETTINGS
model, journal, prompt, sampling, num_tokens, num_sessions = sys.argv[1:]
printing, left = threading.Lock(), threading.Semaphore(0)
with launch_local(model, num_stages=2, context_tokens=768, deterministic=True, journal_dir=journal) as built:
    wanted = GenerationRequest(
        prompt=tuple(built.tokenizer.encode(PROMPTS[prompt])),
        max_tokens=int(num_tokens),
        sampling=SETTINGS[sampling],
        ignore_eos=True,
    )
    def listen(index):
        def take(event):
            with printing:
                print(json.dumps([index, event.id]), flush=True)
            if event.finish_reason:
                left.release()
        return take
    for index in range(int(num_sessions)):
        built.submit(wanted, listen(index))
    with printing:
        print(json.dumps("submitted"), flush=True)
    for _ in range(int(num_sessions)):
        left.acquire()
"""


class Child:
    """A driver process, read until a phase is reached."""

    def __init__(self, model: Path, journal: Path, phase: str, sampling: str, num_sessions: int) -> None:
        prompt, self._at_token, num_tokens = PHASES[phase]
        command = [sys.executable, "-c", DRIVER, str(model), str(journal), prompt, sampling, str(num_tokens), str(num_sessions)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.got: dict[int, list[int]] = defaultdict(list)
        self._submitted = False

    def read(self, *, all_of_it: bool = False) -> None:
        """Until the phase, or the end."""
        assert self.process.stdout is not None
        while all_of_it or not self._submitted or max(map(len, self.got.values()), default=0) < self._at_token:
            line = self.process.stdout.readline()
            if not line:
                return
            said = json.loads(line)
            if said == "submitted":
                self._submitted = True
            else:
                self.got[said[0]].append(said[1])

    def end(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.process.kill()
        self.process.wait(timeout=30)


@pytest.fixture(scope="module")
def wanted(sample_gguf: Path) -> dict[tuple[str, str], list[int]]:
    """Undisturbed runs."""
    out = {}
    with launch_local(sample_gguf, num_stages=2, context_tokens=768, deterministic=True) as built:
        for phase, (prompt, _, num_tokens) in PHASES.items():
            for sampling, settings in SETTINGS.items():
                ids = tuple(built.tokenizer.encode(PROMPTS[prompt]))
                request = GenerationRequest(prompt=ids, max_tokens=num_tokens, sampling=settings, ignore_eos=True)
                out[phase, sampling] = [token.id for token in built.stream(request)]
    return out


@pytest.mark.parametrize("num_sessions", [1, 4])
@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("phase", PHASES)
def test_killed(
    sample_gguf: Path,
    tmp_path: Path,
    wanted: dict[tuple[str, str], list[int]],
    phase: str,
    sampling: str,
    num_sessions: int,
) -> None:
    """Its workers die with it; every session is in the journal and ends with the tokens of an undisturbed run."""
    child = Child(sample_gguf, tmp_path, phase, sampling, num_sessions)
    child.read()
    workers = [p for p in psutil.Process(child.process.pid).children(recursive=True) if "shardwise" in " ".join(p.cmdline())]
    child.end()
    assert len(workers) >= 2
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    with launch_local(sample_gguf, num_stages=2, context_tokens=768, deterministic=True, journal_dir=str(tmp_path)) as built:
        left = built.unfinished
        done = sum(len(got) == len(wanted[phase, sampling]) for got in child.got.values())
        assert num_sessions - done <= len(left) <= num_sessions
        streams = [built.resume(session) for session in left]
        for session, stream in zip(left, streams, strict=True):
            assert [*session.generated, *(token.id for token in stream)] == wanted[phase, sampling]


@pytest.mark.parametrize("num_sessions", [1, 4])
@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("seconds", [3, 20])
def test_stopped(
    sample_gguf: Path,
    tmp_path: Path,
    wanted: dict[tuple[str, str], list[int]],
    seconds: int,
    sampling: str,
    num_sessions: int,
) -> None:
    """SIGSTOP in every phase (three drivers at the same time); its own pause is nobody's fault."""
    children = {phase: Child(sample_gguf, tmp_path / phase, phase, sampling, num_sessions) for phase in PHASES}
    try:
        for child in children.values():
            child.read()
            os.kill(child.process.pid, signal.SIGSTOP)
        SystemClock().sleep(seconds)
        for child in children.values():
            os.kill(child.process.pid, signal.SIGCONT)
        for phase, child in children.items():
            child.read(all_of_it=True)
            assert child.process.wait(timeout=60) == 0
            assert list(child.got.values()) == [wanted[phase, sampling]] * num_sessions
    finally:
        for child in children.values():
            child.end()
