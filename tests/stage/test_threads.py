"""How many threads a stage takes, and that more of them do not wait for each other in vain."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise import processors
from shardwise.deploy import launch_local
from shardwise.processors import default_threads

TIMES = """
import sys, tempfile, time
from contextlib import closing
from pathlib import Path
import numpy as np
from shardwise.shards.slicing import slice_model
from shardwise.stage.backend import BatchSegment
from shardwise.stage.llama.backend import LlamaCppBackend
from shardwise.stage.settings import BackendSettings

with tempfile.TemporaryDirectory() as folder:
    files = slice_model(sys.argv[1], 0, 10, Path(folder))
    for threads in (1, 2):
        settings = BackendSettings(context_tokens=512, max_sessions=1, chunk_tokens=128, threads=threads, blas="on")
        with closing(LlamaCppBackend(files, settings, main_quantization="Q4_1")) as backend:
            assert backend.blas
            x_TH = backend.embed(np.arange(1000, 1128, dtype=np.int32))
            times = []
            for _ in range(5):
                backend.rollback(0, 0)
                started_s = time.perf_counter()
                backend.forward([BatchSegment(0, 0, 128, False)], x_TH)
                times.append(time.perf_counter() - started_s)
            print(min(times))
"""


@pytest.mark.parametrize(("cores", "stages", "threads"), [(1, 1, 1), (2, 1, 1), (2, 3, 1), (8, 1, 7), (8, 2, 3), (16, 3, 5)])
def test_one_core_is_left_and_the_others_are_shared(
    cores: int, stages: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "usable_cores", lambda: cores)
    assert default_threads(stages) == threads


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_workers_take_them(sample_gguf: Path) -> None:
    """As their system counts: threads of a computation beside those of ZeroMQ and the heart."""
    with launch_local(sample_gguf, num_stages=1, context_tokens=128) as one:
        list(one.generate("Hello", max_tokens=2))
        usual = len(os.listdir(f"/proc/{one.stats()[0].pid}/task"))
    with launch_local(sample_gguf, num_stages=1, context_tokens=128, threads=default_threads() + 1) as more:
        list(more.generate("Hello", max_tokens=2))
        assert len(os.listdir(f"/proc/{more.stats()[0].pid}/task")) > usual


@pytest.mark.bench
@pytest.mark.skipif(processors.usable_cores() < 2, reason="two cores")
def test_two_threads_do_not_hold_each_other_up_in_blas(sample_gguf: Path) -> None:
    """OpenBLAS's waiting threads took the cores of ggml's: a chunk took 30 times as long."""
    done = subprocess.run(
        [sys.executable, "-c", TIMES, str(sample_gguf)], capture_output=True, text=True, check=True, timeout=120
    )
    one, two = map(float, done.stdout.split())
    assert two < 4 * one
