"""Short time slices for threads that pass messages on: asked for, and not handed down to threads and processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shardwise.transport.promptness import SLICE_S, prefer_promptness, prompt_context


def slice_s(text: str) -> float | None:
    """What the kernel says, where it says it."""
    found = [line for line in text.splitlines() if line.startswith("se.slice")]
    return int(found[0].rsplit(":", 1)[1]) / 1e9 if found else None


def seen_by_a_thread() -> tuple[bool, float | None, float | None, int]:
    """(was it granted, the thread's slice, its child's slice, its nice value)."""
    out: list[tuple[bool, float | None, float | None, int]] = []

    def run() -> None:
        granted = prefer_promptness()
        own = Path(f"/proc/self/task/{threading.get_native_id()}/sched")
        mine = slice_s(own.read_text()) if own.exists() else None
        child = subprocess.run(["cat", "/proc/self/sched"], capture_output=True, text=True, check=False).stdout
        out.append((granted, mine, slice_s(child), os.getpriority(os.PRIO_PROCESS, 0) if sys.platform == "linux" else 0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    return out[0]


def test_a_thread_is_given_a_short_slice_and_its_children_are_not() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0) if sys.platform == "linux" else 0
    granted, mine, childs, nice = seen_by_a_thread()
    assert nice == before
    if mine is not None and granted:  # the kernel shows it (6.12 and later keep it)
        assert mine == pytest.approx(SLICE_S) or mine == childs
        assert childs != pytest.approx(SLICE_S)


def threads_named(name: str) -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir() if name in (task / "comm").read_text()}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_threads_of_a_prompt_context_have_short_slices_and_its_maker_keeps_its_own() -> None:
    before = threads_named("ZMQbg/IO")
    context = prompt_context()
    try:
        started = threads_named("ZMQbg/IO") - before
        assert len(started) == 1
        shown = [
            slice_s(Path(f"/proc/self/task/{n}/sched").read_text())
            for n in started
            if Path(f"/proc/self/task/{n}/sched").exists()
        ]
        mine = Path(f"/proc/self/task/{threading.get_native_id()}/sched")
        if any(shown) and slice_kept():
            assert shown == [pytest.approx(SLICE_S)]
            assert slice_s(mine.read_text()) != pytest.approx(SLICE_S)
    finally:
        context.destroy(linger=0)


def slice_kept() -> bool:
    """Whether this kernel keeps a slice that is asked for (6.12 and later)."""
    granted, mine, childs, _ = seen_by_a_thread()
    return granted and mine != childs


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "unknown")
    assert prefer_promptness() is False
