"""SIGINT in the middle of a sentence: one word, status 130, and no process stays."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster.waiting import wait_until


def listen_to_interrupts() -> None:
    """A test run in the background ignores them, and its children with it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_run_that_is_interrupted_says_so(flags: list[str], sample_gguf: Path) -> None:
    command = [sys.executable, "-m", "shardwise", "run", str(sample_gguf), "--stages", "2", "--ctx", "2048"]
    process = subprocess.Popen(
        [*command, "-n", "1900", "-p", "Count: 1, 2,", "--ignore-eos", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=listen_to_interrupts,
    )
    try:
        workers: list[psutil.Process] = []

        def loaded() -> bool:
            workers[:] = psutil.Process(process.pid).children(recursive=True)
            return len(workers) >= 2 and all(worker.memory_info().rss > 60 * 2**20 for worker in workers[:2])

        wait_until(loaded, 60, "two workers that have loaded")
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors
    if flags:
        assert json.loads(out)["error"]["type"] == "Interrupted"
    wait_until(lambda: not any(worker.is_running() for worker in workers), 10, "end of the workers")
