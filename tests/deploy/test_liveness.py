"""When a silent stage is lost, and when it only waits for a processor: the rule, and what a system says of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shardwise.clock import SystemClock
from shardwise.cluster.scheduling import UNKNOWN, Scheduling, scheduling_of
from shardwise.deploy.liveness import CUT_OFF_CAP_S, SILENT_AFTER_S, STARVED_CAP_S, Starvation, is_cut_off, judge
from shardwise.session.recovery import Cause
from shardwise.session.step_history import LEAST_STEPS, StepHistory
from tests.deploy.faults import eventually

STOPPED, BLOCKED = Scheduling(state="stopped"), Scheduling(state="blocked")


@pytest.mark.parametrize(
    ("silent_s", "nodes", "causes", "expected"),
    [
        ((1.6, 1.4, 1.5), ("a", "b", "c"), (Cause.SILENT, Cause.SILENT), True),
        ((1.6, 0.1, 1.5), ("a", "b", "c"), (Cause.SILENT, Cause.SILENT), False),  # one is heard: the others are lost
        ((1.6, 1.5), ("a", "a"), (Cause.SILENT,), False),  # one machine: it may be the one that is cut off
        ((1.6,), ("a",), (Cause.SILENT,), False),
        ((1.6, 1.5), ("a", "b"), (Cause.STOPPED, Cause.SILENT), False),  # their system knows better
        ((CUT_OFF_CAP_S + 0.1, CUT_OFF_CAP_S), ("a", "b"), (Cause.SILENT,), False),  # nobody is waited for longer
    ],
)
def test_whether_this_side_is_cut_off(
    silent_s: tuple[float, ...], nodes: tuple[str, ...], causes: tuple[Cause, ...], expected: bool
) -> None:
    assert is_cut_off(dict(enumerate(silent_s)), nodes, causes) is expected


def test_silence_alone() -> None:
    assert judge(SILENT_AFTER_S - 0.1, 0.0, UNKNOWN, 0.0) is None
    lost = judge(SILENT_AFTER_S + 0.1, 0.0, UNKNOWN, 0.0)
    assert lost is not None
    assert lost.cause is Cause.SILENT
    assert judge(SILENT_AFTER_S + 0.1, 0.5, UNKNOWN, 0.0) is None  # the watcher itself gets no processor


def test_a_stopped_process_is_replaced_at_once_where_a_hot_replica_stands_by() -> None:
    assert judge(0.3, 0.0, STOPPED, 0.0, hot=True) is None
    lost = judge(0.4, 0.0, STOPPED, 0.0, hot=True)
    assert lost is not None
    assert lost.cause is Cause.STOPPED
    assert judge(0.4, 0.0, STOPPED, 0.0) is None  # a short stop costs less than a restart
    assert judge(SILENT_AFTER_S + 0.1, 3.0, STOPPED, 0.0) is not None  # there is no doubt: no more patience


def test_an_overdue_step_and_missing_beats_are_enough_for_the_hot_switch_only() -> None:
    assert judge(0.8, 0.0, UNKNOWN, 0.0, overdue_s=0.3, hot=True) is not None
    assert judge(0.8, 0.0, UNKNOWN, 0.0, overdue_s=0.0, hot=True) is None
    assert judge(0.8, 0.0, UNKNOWN, 0.0, overdue_s=0.3) is None
    assert judge(0.5, 0.0, UNKNOWN, 0.0, overdue_s=0.3, hot=True) is None


def test_the_starved_are_waited_for_but_not_for_ever() -> None:
    assert judge(5.0, 0.0, UNKNOWN, 0.9) is None
    assert judge(5.0, 0.0, BLOCKED, 0.0) is None
    assert judge(STARVED_CAP_S + 0.1, 0.0, BLOCKED, 0.9) is not None


def test_starvation_is_of_the_last_moments() -> None:
    seen = Starvation()
    for tenth in range(11):
        seen.take(tenth / 10, Scheduling(state="sleeping", delay_s=0.09 * tenth, compute_s=0.01 * tenth))
    assert seen.share(1.0) == pytest.approx(0.9)
    assert seen.share(2.5) < 0.4  # nothing new since: it sleeps
    waiting = Starvation()
    for tenth in range(11):
        waiting.take(tenth / 10, Scheduling(state="running", num_ready=1))
    assert waiting.share(1.0) == 1.0  # ready, and has not run at all


def test_a_deadline_is_ten_times_the_99th_percentile() -> None:
    history = StepHistory()
    assert history.deadline_s == float("inf")
    for _ in range(LEAST_STEPS + 80):
        history.add(0.02)
    assert history.deadline_s == pytest.approx(0.2)


@pytest.fixture
def burner() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield child
    child.kill()
    child.wait()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_the_system_knows_who_is_stopped(burner: subprocess.Popen[bytes]) -> None:
    eventually(lambda: scheduling_of(burner.pid).state == "running", "running")
    os.kill(burner.pid, signal.SIGSTOP)
    eventually(lambda: scheduling_of(burner.pid).state == "stopped", "stopped")
    os.kill(burner.pid, signal.SIGCONT)
    eventually(lambda: scheduling_of(burner.pid).state == "running", "running again")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts waiting times")
def test_the_system_knows_who_waits_for_a_processor(burner: subprocess.Popen[bytes]) -> None:
    """Six on one core: each waits for five sixths of the time."""
    clock, core = SystemClock(), min(os.sched_getaffinity(0))
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(5)]
    try:
        for child in (burner, *others):
            os.sched_setaffinity(child.pid, {core})
        seen, started_s = Starvation(), clock.now_s()
        while (now_s := clock.now_s()) - started_s < 1.2:
            seen.take(now_s, scheduling_of(burner.pid))
            clock.sleep(0.05)
        assert seen.share(clock.now_s()) > 0.6
    finally:
        for child in others:
            child.kill()
            child.wait()


def test_nothing_is_known_of_a_process_that_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert scheduling_of(child.pid) == UNKNOWN
