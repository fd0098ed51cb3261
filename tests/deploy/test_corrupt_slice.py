"""A slice that was damaged is refused by the worker that should load it, and cut again: never a wrong token."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from shardwise.deploy import launch_local
from tests.deploy.faults import Watched, request, undisturbed


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_a_damaged_slice_is_cut_again(sample_gguf: Path, tmp_path: Path, stage: int) -> None:
    cache = str(tmp_path / "cache")
    with launch_local(sample_gguf, num_stages=2, context_tokens=512, deterministic=True, cache_dir=cache) as built:
        wanted = undisturbed(built, request(built, sampling="sampled"))
        session = Watched(built, request(built, sampling="sampled"))
        session.wait_for(10)
        for file in built.manifest.stages[stage].files:
            path = next(Path(cache).rglob(file.name))
            # The running worker has the old file mapped: a disk that rots does not change what is in memory.
            damaged = path.with_suffix(".damaged")
            shutil.copy(path, damaged)
            with damaged.open("r+b") as stream:
                stream.seek(file.num_bytes // 2)
                byte = stream.read(1)
                stream.seek(-1, os.SEEK_CUR)
                stream.write(bytes([byte[0] ^ 0x10]))
            damaged.replace(path)
        os.kill(built.stages[stage].pid, signal.SIGKILL)
        assert session.ids() == wanted
        recovery = built.recoveries[-1]
        assert recovery.action == f"recut of stage {stage}"
        assert recovery.grade == "exact"
