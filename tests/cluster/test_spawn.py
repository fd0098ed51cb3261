"""Who starts workers, and which signals reach them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

AFTER_MAIN = """
import sys, threading, time
from shardwise.deploy import launch_local

def texts(deployment):
    return [token.id for token in deployment.generate("Once upon a time", max_tokens=20)]

def work():
    with launch_local(sys.argv[1], num_stages=2, context_tokens=128) as deployment:
        expected = texts(deployment)
        going_on.set()
        threading.main_thread().join()
        time.sleep(1.0)  # what would end with the main thread has ended
        assert texts(deployment) == expected
        assert not deployment.recoveries, deployment.recoveries
    with launch_local(sys.argv[1], num_stages=2, context_tokens=128) as deployment:
        assert texts(deployment) == expected
    print("all is well", flush=True)

going_on = threading.Event()
threading.Thread(target=work).start()
going_on.wait()
"""


def test_workers_live_and_start_after_the_main_thread(sample_gguf: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AFTER_MAIN, str(sample_gguf)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("all is well\n", "", 0)


@pytest.mark.skipif(os.name == "nt", reason="groups of processes are POSIX's")
@pytest.mark.parametrize("after_s", [0.3, 0.45, 0.6])
def test_an_interrupt_of_the_whole_group_is_the_servers_to_handle(after_s: float, sample_gguf: Path) -> None:
    """As a terminal's Ctrl-C; workers that took it too would be reported as lost."""
    command = [sys.executable, "-m", "shardwise", "serve", str(sample_gguf), "--stages", "3", "--port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        time.sleep(after_s)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in (0, 130, -signal.SIGINT), errors
    assert "error:" not in errors
    assert "Traceback" not in errors
