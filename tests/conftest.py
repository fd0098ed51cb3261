"""Shared by all tests: the sample model, and proof that no worker process is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shardwise.cluster.spawn import UNSET

for _name in UNSET:  # workers start without: the reference in this process must round as they do
    os.environ.pop(_name, None)


@pytest.fixture(scope="session")
def sample_gguf() -> Path:
    """SmolLM2-135M-Instruct Q4_1, from the extra `sample`."""
    from shardwise.model.resolve import sample_path

    return sample_path()


@pytest.fixture(scope="session", autouse=True)
def no_worker_is_left() -> Iterator[None]:
    """A stage worker that outlives its test fails the run."""
    yield
    left = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "shardwise.stage" in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
        except psutil.NoSuchProcess:
            continue
    for process in left:
        process.kill()
    assert not left, f"worker processes were left behind: {left}"
