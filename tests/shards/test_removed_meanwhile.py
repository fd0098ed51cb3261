"""A cache may be emptied while slices are cut: the work is done once more, or ends in one line; never in a traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from shardwise.errors import UsageError
from shardwise.model import sample_path
from shardwise.shards.packing import make_manifest, pack_model
from shardwise.shards.slicing import slice_model
from shardwise.shards.verify import verify_dir
from tests.shards.conftest import NUM_LAYERS, SETTINGS

SYSTEM_CALLS = {"access", "fsync", "mkdir", "open", "rename", "replace", "scandir", "stat", "statvfs", "unlink", "disk_usage"}
SPLIT = [10, NUM_LAYERS - 10]
Work = Callable[[Path, Path], Any]  # (model, directory)


@contextmanager
def removed_before(directory: Path, turns: range) -> Iterator[list[str]]:
    """Remove the directory in front of these of the program's calls into the system; yields the calls' names so far."""
    calls: list[str] = []
    busy = False

    def on_call(frame: FrameType, event: str, function: Any) -> None:
        nonlocal busy
        name = getattr(function, "__name__", "")
        if busy or event != "c_call" or name not in SYSTEM_CALLS:
            return
        calls.append(name)
        if len(calls) - 1 in turns:
            busy = True
            shutil.rmtree(directory, ignore_errors=True)
            busy = False

    sys.setprofile(on_call)
    try:
        yield calls
    finally:
        sys.setprofile(None)


WORKS: dict[str, Work] = {
    "pack": lambda model, directory: pack_model(model, SPLIT, directory, SETTINGS),
    "pack another split": lambda model, directory: pack_model(model, [12, NUM_LAYERS - 12], directory, SETTINGS),
    "manifest": lambda model, directory: make_manifest(model, [NUM_LAYERS], SETTINGS, stamp_dir=directory),
    "slice": lambda model, directory: slice_model(model, 0, 10, directory),
}


SHORT = {("pack", True), ("slice", True)}  # the others belong to `make soak`
MOMENTS = [
    pytest.param(work, there, marks=[] if (work, there) in SHORT else pytest.mark.soak)
    for work in WORKS
    for there in (False, True)
]


@pytest.mark.parametrize(("work", "there"), MOMENTS)
def test_once_at_any_moment(work: str, there: bool, tiny: Path, tmp_path: Path) -> None:
    """`there`: from a run before, so that what is there is looked at and kept."""
    turn, num_calls, kept = 0, 1, 0
    while turn < num_calls:
        directory = tmp_path / f"{turn}" / "slices"
        if there:
            pack_model(tiny, SPLIT, directory, SETTINGS)
            slice_model(tiny, 0, 10, directory)
        with removed_before(directory, range(turn, turn + 1)) as calls:
            made = WORKS[work](tiny, directory)
        num_calls = max(num_calls, len(calls)) if turn else len(calls)
        if directory.exists() and work.startswith("pack") and (directory / "manifest.json").exists():
            assert verify_dir(directory) == []
            kept += 1
        elif directory.exists() and work == "slice":
            assert Path(made.weights).exists()
            kept += 1
        shutil.rmtree(directory, ignore_errors=True)
        turn += 1
    assert num_calls > 8
    assert work == "manifest" or kept > num_calls // 2


@pytest.mark.parametrize("work", ["pack", "slice"])
def test_again_and_again_is_said_in_one_line(work: str, tiny: Path, tmp_path: Path) -> None:
    with removed_before(tmp_path / "slices", range(1_000_000)), pytest.raises(UsageError) as caught:
        WORKS[work](tiny, tmp_path / "slices")
    assert caught.value.exit_code == 2
    assert caught.value.hint


def test_the_program_beside_one_who_removes(tmp_path: Path) -> None:
    """Two processes: one packs, the other removes the folder as often as it can."""
    out = tmp_path / "out"
    remover = subprocess.Popen(["sh", "-c", 'while :; do rm -rf "$1" 2>/dev/null; done', "sh", str(out)])
    try:
        for _ in range(3):
            command = [sys.executable, "-m", "shardwise", "pack", str(sample_path()), "--layers", "10,12,8", "--out", str(out)]
            done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60)
            assert "Traceback" not in done.stderr
            assert done.returncode in (0, 2), done.stderr
            if done.returncode:
                assert json.loads(done.stdout)["error"]["hint"]
    finally:
        remover.kill()
        remover.wait()
