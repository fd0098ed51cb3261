"""What every `ClusterEngine` must do. A test class per engine inherits this and brings `engine` and its own `crash`."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any

import pytest

from shardwise.cluster import ClusterEngine, WorkerSpec, WorkerStatus
from shardwise.errors import StageLoadFailed, UsageError
from tests.cluster.waiting import is_gone, wait_until

WORKER = "tests.cluster.tiny_worker"


def tiny(name: str, node: str = "", **wishes: Any) -> WorkerSpec:
    return WorkerSpec(name=name, node=node, module=WORKER, config=json.dumps(wishes).encode())


class EngineContract:
    """Promises of `ClusterEngine`, one test each."""

    real = True  # has processes

    def crash(self, engine: ClusterEngine, name: str, exit_status: int) -> WorkerSpec:
        """Start a worker that ends by itself, with a last word in its log."""
        spec = tiny(name, log=["the last word"], exit=exit_status)
        engine.start(spec)
        return spec

    def wait_dead(self, engine: ClusterEngine, name: str) -> WorkerStatus:
        wait_until(lambda: not engine.status(name).alive, 30.0, f"{name} is dead")
        return engine.status(name)

    @pytest.fixture(autouse=True)
    def _nothing_left(self, engine: ClusterEngine) -> Any:
        """A module may share one engine; a test leaves no worker in it."""
        yield
        for status in engine.statuses():
            engine.stop(status.name, grace_s=0.5)
        assert engine.statuses() == []

    def test_a_started_worker_lives_on_its_node(self, engine: ClusterEngine) -> None:
        node = engine.nodes()[-1]
        engine.start(tiny("one", node))
        status = engine.status("one")
        assert (status.name, status.node, status.alive, status.exit_status) == ("one", node, True, None)
        assert status.pid
        assert not (self.real and is_gone(status.pid))

    def test_every_node_takes_workers(self, engine: ClusterEngine) -> None:
        nodes = engine.nodes()
        for index, node in enumerate(nodes):
            engine.start(tiny(f"w{index}", node))
        assert {s.name: s.node for s in engine.statuses()} == {f"w{i}": n for i, n in enumerate(nodes)}
        assert [info.name for info in engine.node_infos()] == nodes

    def test_any_node_will_do_where_none_is_named(self, engine: ClusterEngine) -> None:
        engine.start(tiny("anywhere"))
        assert engine.status("anywhere").node in engine.nodes()

    def test_a_crash_shows_exit_status_and_log(self, engine: ClusterEngine) -> None:
        self.crash(engine, "crashing", 3)
        status = self.wait_dead(engine, "crashing")
        assert status.exit_status == 3
        assert "the last word" in status.log_tail
        assert status.memory_bytes == 0

    def test_a_new_start_replaces_the_old_worker(self, engine: ClusterEngine) -> None:
        engine.start(tiny("same"))
        first = engine.status("same").pid
        engine.start(tiny("same"))
        second = engine.status("same")
        assert second.alive
        assert second.pid != first
        assert len(engine.statuses()) == 1
        if self.real and first:
            wait_until(lambda: is_gone(first), what="the first worker is gone")

    def test_a_crashed_worker_can_be_started_again(self, engine: ClusterEngine) -> None:
        self.crash(engine, "again", 1)
        self.wait_dead(engine, "again")
        engine.start(tiny("again"))
        status = engine.status("again")
        assert status.alive
        assert status.exit_status is None

    def test_stop_leaves_nothing_and_may_be_repeated(self, engine: ClusterEngine) -> None:
        engine.start(tiny("short"))
        pid = engine.status("short").pid
        engine.stop("short")
        engine.stop("short")
        engine.stop("never started")
        assert not self.real or (pid and is_gone(pid))
        with pytest.raises(UsageError, match="no worker 'short'"):
            engine.status("short")

    def test_an_unknown_node_is_named_with_the_known_ones(self, engine: ClusterEngine) -> None:
        with pytest.raises(StageLoadFailed, match="no node 'attic'") as caught:
            engine.start(tiny("lost", "attic"))
        assert engine.nodes()[0] in caught.value.hint
        assert engine.statuses() == []

    def test_many_threads_may_start_and_stop(self, engine: ClusterEngine) -> None:
        def live(index: int) -> None:
            engine.start(tiny(f"t{index}"))
            assert engine.status(f"t{index}").alive
            engine.stop(f"t{index}")

        threads = [threading.Thread(target=live, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert not any(thread.is_alive() for thread in threads)
        assert engine.statuses() == []


class RealEngineContract(EngineContract):
    """Promises that only processes can break."""

    def test_the_configuration_arrives_whole(self, engine: ClusterEngine) -> None:
        spec = tiny("configured", padding="x" * 3_000_000)
        engine.start(spec)
        wait_until(lambda: f"config {len(spec.config)} " in engine.status("configured").log_tail, what="config read")

    def test_a_configuration_that_nobody_reads_blocks_nobody(self, engine: ClusterEngine) -> None:
        engine.start(WorkerSpec(name="deaf", module="this.module.is.missing", config=b"x" * 3_000_000))
        status = self.wait_dead(engine, "deaf")
        assert status.exit_status
        assert "this.module.is.missing" in status.log_tail or "No module named" in status.log_tail

    def test_environment_and_log_limits(self, engine: ClusterEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")  # tuned for another machine: no worker gets it
        spec = tiny("env", show=["SHARDWISE_COLOUR", "OPENBLAS_CORETYPE"], log=[f"line {i}" for i in range(300)] + ["y" * 10_000])
        engine.start(WorkerSpec(name="env", module=WORKER, config=spec.config, environment={"SHARDWISE_COLOUR": "green"}))
        wait_until(lambda: "OPENBLAS_CORETYPE=None" in engine.status("env").log_tail, what="environment shown")
        tail = engine.status("env").log_tail
        assert "SHARDWISE_COLOUR=green" in tail
        assert "line 299" in tail
        assert "line 1\n" not in tail
        assert max(len(line) for line in tail.splitlines()) <= 2000

    def test_memory_is_that_of_the_process(self, engine: ClusterEngine) -> None:
        engine.start(tiny("weighed"))
        wait_until(lambda: engine.status("weighed").memory_bytes > 2 * 2**20, what="memory is reported")

    def test_a_signal_shows_as_negative_status(self, engine: ClusterEngine) -> None:
        engine.start(tiny("shot"))
        wait_until(lambda: "config" in engine.status("shot").log_tail, what="worker runs")
        os.kill(engine.status("shot").pid or 0, signal.SIGKILL)
        assert self.wait_dead(engine, "shot").exit_status == -signal.SIGKILL

    def test_a_worker_that_ignores_its_end_is_killed(self, engine: ClusterEngine) -> None:
        engine.start(tiny("frozen"))
        pid = engine.status("frozen").pid or 0
        os.kill(pid, signal.SIGSTOP)
        engine.stop("frozen", grace_s=0.2)
        assert is_gone(pid)
