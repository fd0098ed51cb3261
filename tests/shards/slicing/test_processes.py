"""Parity that needs a process of its own: BLAS, threads, memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_slices_are_exact_with_blas_and_with_two_threads(tmp_path: Path) -> None:
    found = json.loads(run("-m", "tests.shards.slicing.blas_parity", str(tmp_path)).splitlines()[-1])
    if sys.platform != "darwin":
        assert found.pop("blas") is True, "this build of llama.cpp has no BLAS: run tools/bootstrap.py"
    assert len(found) >= 10
    assert {name: difference for name, difference in found.items() if difference not in (0.0, True)} == {}


_SLICE_AND_REPORT = """
import resource, sys
from shardwise.shards.slicing import slice_model
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
slice_model(sys.argv[1], 0, 1, sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="rusage is POSIX")
def test_slicing_holds_one_piece_of_a_tensor_in_memory(tmp_path: Path) -> None:
    """A sparse file with tensors of 128 MiB is cut with less than 64 MiB (a piece is 8 MiB)."""
    from tests.shards.slicing.sparse import write_sparse_llama

    path = tmp_path / "large.gguf"
    write_sparse_llama(path, matrix_bytes=128 << 20)
    used = int(run("-c", _SLICE_AND_REPORT, str(path), str(tmp_path / "out")))
    used_bytes = used if sys.platform == "darwin" else used * 1024
    assert used_bytes < 64 << 20
