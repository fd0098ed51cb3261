"""RayEngine keeps the contract on two raylets, and survives the loss of its broker, a raylet and the head."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator

import psutil
import pytest

from shardwise.cluster import ClusterEngine, WorkerSpec
from shardwise.cluster.ray_engine import RayAddress, RayEngine, RaySecurity
from shardwise.cluster.ray_engine.raylet import Raylet, RayletSettings, RayPorts
from shardwise.errors import AuthenticationFailed, ConnectFailed, NetworkError, StageLoadFailed
from tests.cluster.engine_contract import WORKER, RealEngineContract, tiny
from tests.cluster.ports import free_port
from tests.cluster.waiting import is_gone, wait_until

SECURITY = RaySecurity(token=secrets.token_hex(32))
IP = "127.0.0.1"
MEMORY_BYTES = 2 * 2**30


class Home:
    """A head and one more node."""

    def __init__(self) -> None:
        self.head_port = free_port()
        self.head = Raylet(self.head_settings(), SECURITY)
        self.head.wait_started()
        self.nas = self.join("nas", 1)
        self.address = RayAddress(head=f"{IP}:{self.head_port}", own_ip=IP)

    def head_settings(self) -> RayletSettings:
        ports = RayPorts(head=self.head_port)
        return RayletSettings(name="desk", identity="d1", own_ip=IP, ports=ports, memory_bytes=MEMORY_BYTES)

    def join(self, name: str, incarnation: int) -> Raylet:
        settings = RayletSettings(
            name=name,
            identity=f"id-{name}",
            own_ip=IP,
            join=f"{IP}:{self.head_port}",
            incarnation=incarnation,
            memory_bytes=MEMORY_BYTES,
        )
        raylet = Raylet(settings, SECURITY)
        raylet.wait_started()
        return raylet

    def close(self) -> None:
        self.nas.stop()
        self.head.stop()


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    home = Home()
    yield home
    home.close()


@pytest.fixture(scope="module")
def shared(home: Home) -> Iterator[RayEngine]:
    engine = RayEngine(lambda: (home.address, SECURITY))
    yield engine
    engine.close()


class TestRayEngine(RealEngineContract):
    @pytest.fixture
    def engine(self, shared: RayEngine) -> ClusterEngine:
        return shared

    def test_nodes_are_named_by_their_labels(self, engine: ClusterEngine) -> None:
        assert [(i.name, i.identity) for i in engine.node_infos()] == [("desk", "d1"), ("nas", "id-nas")]
        assert all(info.address for info in engine.node_infos())

    def test_memory_is_reserved(self, engine: ClusterEngine) -> None:
        free = {info.name: info.memory_bytes for info in engine.node_infos()}["nas"]
        engine.start(WorkerSpec(name="big", node="nas", module=WORKER, memory_bytes=free - 1))
        with pytest.raises(StageLoadFailed, match="has 1 of the 2 bytes"):
            engine.start(WorkerSpec(name="small", node="nas", module=WORKER, memory_bytes=2))
        engine.stop("big")
        assert {info.name: info.memory_bytes for info in engine.node_infos()}["nas"] == free

    def test_no_worker_sees_the_token(self, engine: ClusterEngine) -> None:
        engine.start(tiny("curious", "nas", show=["RAY_AUTH_TOKEN", "RAY_AUTH_MODE"]))
        wait_until(lambda: "RAY_AUTH_MODE=None" in engine.status("curious").log_tail, what="environment shown")
        assert "RAY_AUTH_TOKEN=None" in engine.status("curious").log_tail


def test_a_wrong_token_is_refused(home: Home) -> None:
    with pytest.raises(AuthenticationFailed):
        RayEngine(lambda: (home.address, RaySecurity(token="0" * 64)))


def test_no_head_no_engine() -> None:
    with pytest.raises((ConnectFailed, NetworkError)):
        RayEngine(lambda: (RayAddress(head=f"{IP}:{free_port()}", own_ip=IP), SECURITY), attach_timeout_s=20)


def test_a_killed_broker_is_replaced_and_its_workers_end(home: Home, shared: RayEngine) -> None:
    shared.start(tiny("w", "nas"))
    pid = shared.status("w").pid or 0
    broker = next(p for p in psutil.Process().children(recursive=True) if "broker" in " ".join(p.cmdline()))
    broker.kill()
    wait_until(lambda: not shared.status("w").alive, 5, "the worker is dead to the engine")
    wait_until(lambda: is_gone(pid), 20, "the worker is gone")
    wait_until(lambda: shared.nodes() == ["desk", "nas"], 30, "attached again")
    shared.start(tiny("w", "nas"))
    assert shared.status("w").alive
    shared.stop("w")


def test_a_killed_raylet_takes_its_workers_and_comes_back(home: Home, shared: RayEngine) -> None:
    shared.start(tiny("stays", "desk"))
    shared.start(tiny("falls", "nas"))
    pid = shared.status("falls").pid or 0
    os.kill(home.nas.pid, signal.SIGKILL)
    wait_until(lambda: not shared.status("falls").alive, 15, "the lost worker is seen")
    assert "nas" in shared.status("falls").log_tail
    assert shared.status("stays").alive
    wait_until(lambda: is_gone(pid), 15, "the lost worker is gone")
    home.nas.stop()
    home.nas = home.join("nas", 2)
    wait_until(lambda: "nas" in shared.nodes(), 20, "the node is back")
    shared.start(tiny("falls", "nas"))
    assert shared.status("falls").alive
    shared.stop("falls")
    shared.stop("stays")


def test_a_killed_head_ends_everything_and_a_new_one_is_found(home: Home, shared: RayEngine) -> None:
    """Without a database of its own Ray's control service forgets: workers end, and start again once it is back."""
    shared.start(tiny("w", "nas"))
    pid = shared.status("w").pid or 0
    os.kill(home.head.pid, signal.SIGKILL)
    wait_until(lambda: not shared.status("w").alive, 60, "the workers are dead to the engine")
    wait_until(lambda: is_gone(pid), 60, "the worker is gone")
    with pytest.raises(NetworkError):
        shared.start(tiny("w", "nas"))
    home.head.stop()
    home.nas.stop()
    home.head = Raylet(home.head_settings(), SECURITY)
    home.head.wait_started()
    home.nas = home.join("nas", 3)
    wait_until(lambda: shared.nodes() == ["desk", "nas"], 40, "attached to the new head")
    shared.start(tiny("w", "nas"))
    assert shared.status("w").alive
    shared.stop("w")
