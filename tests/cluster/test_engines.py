"""LocalEngine and FakeEngine keep the contract; and LocalEngine's workers die with it, even on SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shardwise.cluster import ClusterEngine, FakeEngine, LocalEngine, WorkerSpec
from shardwise.errors import StageLoadFailed
from tests.cluster.engine_contract import EngineContract, RealEngineContract, tiny
from tests.cluster.waiting import is_gone, wait_until

GIB = 2**30
HOST = """
import sys
from shardwise.cluster import LocalEngine
from tests.cluster.engine_contract import tiny
from tests.cluster.waiting import wait_until
engine = LocalEngine()
for name in ("a", "b"):
    engine.start(tiny(name))
wait_until(lambda: all("config" in s.log_tail for s in engine.statuses()))
print(*[s.pid for s in engine.statuses()], flush=True)
sys.stdin.read()
"""


class TestLocalEngine(RealEngineContract):
    @pytest.fixture
    def engine(self) -> Iterator[ClusterEngine]:
        engine = LocalEngine({"desk": (), "nas": ("env", "SHARDWISE_HOST=nas")})
        yield engine
        engine.close()

    def test_a_host_is_a_command_prefix(self, engine: ClusterEngine) -> None:
        engine.start(tiny("there", "nas", show=["SHARDWISE_HOST"]))
        wait_until(lambda: "SHARDWISE_HOST=nas" in engine.status("there").log_tail, what="prefix was used")

    def test_a_command_that_is_missing_is_named(self, engine: ClusterEngine) -> None:
        with pytest.raises(StageLoadFailed, match="cannot start worker x"):
            engine.start(WorkerSpec(name="x", prefix=("no-such-program",), module="tests.cluster.tiny_worker"))


class TestFakeEngine(EngineContract):
    real = False

    @pytest.fixture
    def engine(self) -> FakeEngine:
        return FakeEngine({"desk": 16 * GIB, "nas": 8 * GIB})

    def crash(self, engine: ClusterEngine, name: str, exit_status: int) -> WorkerSpec:
        assert isinstance(engine, FakeEngine)
        engine.start(tiny(name))
        engine.crash(name, exit_status, "the last word")
        return tiny(name)

    def test_reservations_are_kept_to_the_byte(self, engine: FakeEngine) -> None:
        engine.start(WorkerSpec(name="a", node="nas", memory_bytes=8 * GIB - 1))
        with pytest.raises(StageLoadFailed, match="has 1 of the 2 bytes"):
            engine.start(WorkerSpec(name="b", node="nas", memory_bytes=2))
        engine.start(WorkerSpec(name="c", memory_bytes=9 * GIB))
        assert engine.status("c").node == "desk"

    def test_a_lost_node_takes_its_workers_along(self, engine: FakeEngine) -> None:
        engine.start(tiny("a", "nas"))
        engine.start(tiny("b", "desk"))
        engine.lose_node("nas")
        assert not engine.status("a").alive
        assert engine.status("b").alive
        assert engine.nodes() == ["desk"]
        engine.add_node("nas", GIB)
        engine.start(tiny("a", "nas"))
        assert engine.status("a").alive


def test_without_declared_hosts_everything_runs_here() -> None:
    engine = LocalEngine()
    try:
        engine.start(tiny("w", "whatever"))
        assert engine.status("w").node == "whatever"
        assert engine.nodes() == ["local"]
    finally:
        engine.close()
        engine.close()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_workers_die_with_a_killed_engine_even_when_stopped() -> None:
    """One worker is frozen: it cannot notice that its input closed. The kernel must end it (Linux)."""
    host = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    assert host.stdin is not None
    with host.stdin, host.stdout:
        pids = [int(word) for word in host.stdout.readline().split()]
        assert len(pids) == 2
        if sys.platform == "linux":
            os.kill(pids[1], signal.SIGSTOP)
        host.kill()
        host.wait(timeout=10)
        for pid in pids:
            wait_until(lambda pid=pid: is_gone(pid), 5.0, f"worker {pid} died with its engine")
