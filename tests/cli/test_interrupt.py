"""SIGINT at any moment: at most one word, status 130, and no process stays."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.cluster.waiting import wait_until


def listen_to_interrupts() -> None:
    """A test run in the background ignores them, and its children with it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Interrupted:
    """A long run with two stages that was interrupted at some moment."""

    def __init__(self, model: Path, flags: list[str], wait: Callable[[psutil.Process], None]) -> None:
        command = [sys.executable, "-m", "shardwise", "run", str(model), "--stages", "2", "--ctx", "2048", "-n", "1900"]
        process = subprocess.Popen(
            [*command, "-p", "Count: 1, 2,", "--ignore-eos", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=listen_to_interrupts,
        )
        try:
            watched = psutil.Process(process.pid)
            wait(watched)
            self.workers = watched.children(recursive=True)
            process.send_signal(signal.SIGINT)
            self.out, self.errors = process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait()
        self.status = process.returncode

    def all_gone(self) -> bool:
        return not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in self.workers)


def loaded(process: psutil.Process) -> None:
    """Until both workers hold their weights."""

    def big() -> bool:
        sizes = [worker.memory_info().rss for worker in process.children(recursive=True)]
        return sum(size > 60 * 2**20 for size in sizes) >= 2

    wait_until(big, 60, "two workers that have loaded")


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_run_that_is_interrupted_says_so(flags: list[str], sample_gguf: Path) -> None:
    run = Interrupted(sample_gguf, flags, loaded)
    assert run.status == 130
    assert run.errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in run.errors
    if flags:
        assert json.loads(run.out)["error"]["type"] == "Interrupted"
    wait_until(run.all_gone, 10, "end of the workers")


@pytest.mark.parametrize("after_s", [0.03, 0.08, 0.15, 0.25, 0.35, 0.5])
def test_no_interrupt_is_lost_or_ends_in_a_traceback(after_s: float, sample_gguf: Path) -> None:
    """Whether it comes while the program is imported, while workers start, or while llama.cpp logs in a callback."""
    run = Interrupted(sample_gguf, [], lambda process: time.sleep(after_s))
    assert run.status in (130, -signal.SIGINT)  # the second: before the program was there to say anything; shells say 130 too
    assert "Traceback" not in run.errors
    assert run.errors.splitlines()[-1:] in ([], ["interrupted"])
    wait_until(run.all_gone, 10, "end of the workers")
