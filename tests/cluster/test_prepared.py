"""Processes that LocalEngine starts ahead of their configuration: used where they fit, and never left behind."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from shardwise.cluster.engine import WorkerSpec
from shardwise.cluster.local import LocalEngine
from tests.cluster.engine_contract import tiny
from tests.cluster.waiting import is_gone, wait_until

HOST = """
import sys
import psutil
from shardwise.cluster.local import LocalEngine
from tests.cluster.waiting import wait_until
engine = LocalEngine()
engine.prepare(2)
if {loaded}:
    wait_until(lambda: all(p.num_threads() == 1 and p.memory_info().rss > 30e6 for p in psutil.Process().children()))
print(*[p.pid for p in psutil.Process().children()], flush=True)
sys.stdin.read()
"""


def children() -> set[int]:
    """Pids of this process's stage workers."""
    return {p.pid for p in psutil.Process().children() if "shardwise.stage" in " ".join(p.cmdline())}


@pytest.fixture
def engine() -> LocalEngine:
    return LocalEngine()


def test_a_start_takes_a_waiting_process(engine: LocalEngine) -> None:
    before = children()
    engine.prepare(2)
    waiting = children() - before
    assert len(waiting) == 2
    assert engine.statuses() == []
    engine.start(WorkerSpec(name="a", node="desk", config=b"{}"))
    status = engine.status("a")
    assert status.pid in waiting
    assert status.node == "desk"
    failed = wait_until(lambda: not engine.status("a").alive and engine.status("a"), what="a bad configuration was read")
    assert failed.exit_status == 2
    assert "not a valid WorkerConfig" in failed.log_tail
    engine.close()
    assert children() == before


def test_what_is_different_gets_a_process_of_its_own(engine: LocalEngine) -> None:
    before = children()
    engine.prepare(1)
    waiting = children() - before
    engine.start(tiny("other-module"))
    engine.start(WorkerSpec(name="environment", config=b"{}", environment={"A": "b"}))
    engine.start(WorkerSpec(name="prefix", config=b"{}", prefix=("env",)))
    assert {status.pid for status in engine.statuses()}.isdisjoint(waiting)
    engine.prepare(0)
    assert all(is_gone(pid) for pid in waiting)
    engine.close()
    assert children() == before


def test_workers_of_declared_hosts_are_not_mixed_up() -> None:
    engine = LocalEngine({"nas": ("env", "SHARDWISE_HOST=nas")})
    before = children()
    engine.prepare(1)
    waiting = children() - before
    engine.start(WorkerSpec(name="a", node="nas", config=b"{}"))
    assert engine.status("a").pid not in waiting
    engine.close()
    assert children() == before


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("loaded", [False, True], ids=["still loading", "waiting"])
def test_waiting_processes_die_with_a_killed_parent(loaded: bool) -> None:
    host = subprocess.Popen(
        [sys.executable, "-c", HOST.format(loaded=loaded)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert host.stdout is not None
    assert host.stdin is not None
    with host.stdin, host.stdout:
        pids = [int(word) for word in host.stdout.readline().split()]
        assert len(pids) == 2
        host.kill()
        host.wait(timeout=10)
        for pid in pids:
            wait_until(lambda pid=pid: is_gone(pid), 5.0, f"waiting process {pid} died with its parent")
