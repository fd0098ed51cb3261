"""RayEngine keeps the contract on two raylets, and survives the loss of its broker, a raylet and the head."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from shardwise.cluster import ClusterEngine, WorkerSpec, lifecycle
from shardwise.cluster.ray_engine import RayAddress, RayEngine, RaySecurity
from shardwise.errors import AuthenticationFailed, ConnectFailed, StageLoadFailed
from shardwise.transport.security import NodeKeys, fingerprint
from tests.cluster.engine_contract import WORKER, RealEngineContract, tiny
from tests.cluster.hosts import Hosts
from tests.cluster.ports import free_port
from tests.cluster.waiting import is_gone, wait_until

IP = "127.0.0.1"


@pytest.fixture(scope="module")
def shared(home: Hosts) -> Iterator[RayEngine]:
    engine = lifecycle.attach(home.state("desk"))
    yield engine
    engine.close()


class TestRayEngine(RealEngineContract):
    @pytest.fixture
    def engine(self, shared: RayEngine) -> ClusterEngine:
        return shared

    def test_nodes_are_named_by_their_labels(self, engine: ClusterEngine, home: Hosts) -> None:
        identities = [fingerprint(NodeKeys.load(home.state(host).node_key).public) for host in ("desk", "nas")]
        assert [(i.name, i.identity) for i in engine.node_infos()] == list(zip(("desk", "nas"), identities, strict=True))
        assert all(info.address for info in engine.node_infos())

    def test_memory_is_reserved(self, engine: ClusterEngine) -> None:
        free = {info.name: info.memory_bytes for info in engine.node_infos()}["nas"]
        engine.start(WorkerSpec(name="big", node="nas", module=WORKER, memory_bytes=free - 1))
        with pytest.raises(StageLoadFailed, match="has 1 of the 2 bytes"):
            engine.start(WorkerSpec(name="small", node="nas", module=WORKER, memory_bytes=2))
        engine.stop("big")
        assert {info.name: info.memory_bytes for info in engine.node_infos()}["nas"] == free

    def test_workers_run_at_the_niceness_of_any_other_process(self, engine: ClusterEngine) -> None:
        engine.start(tiny("eager", "nas"))
        assert psutil.Process(engine.status("eager").pid).nice() == psutil.Process().nice()

    def test_no_worker_sees_the_token(self, engine: ClusterEngine) -> None:
        engine.start(tiny("curious", "nas", show=["RAY_AUTH_TOKEN", "RAY_AUTH_MODE"]))
        wait_until(lambda: "RAY_AUTH_MODE=None" in engine.status("curious").log_tail, what="environment shown")
        assert "RAY_AUTH_TOKEN=None" in engine.status("curious").log_tail


def test_a_wrong_token_or_no_certificate_is_refused(home: Hosts) -> None:
    state = home.state("desk")
    address = RayAddress(head=state.load_cluster().ray_head)
    with pytest.raises(AuthenticationFailed, match="token"):
        RayEngine(lambda: (address, RaySecurity(token="0" * 64, tls_folder=str(state.tls))))
    with pytest.raises(AuthenticationFailed, match="no certificate"):
        RayEngine(lambda: (address, RaySecurity(token=state.load_cluster().ray_token)))


def test_no_head_no_engine() -> None:
    address = RayAddress(head=f"{IP}:{free_port()}", own_ip=IP)
    with pytest.raises(ConnectFailed):
        RayEngine(lambda: (address, RaySecurity(token="0" * 64)), attach_timeout_s=20)


def test_a_killed_broker_is_replaced_and_its_workers_end(shared: RayEngine) -> None:
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


def test_a_killed_raylet_takes_its_workers_and_comes_back(home: Hosts, shared: RayEngine) -> None:
    shared.start(tiny("stays", "desk"))
    shared.start(tiny("falls", "nas"))
    pid = shared.status("falls").pid or 0
    home.process("nas", "raylet").kill()
    wait_until(lambda: not shared.status("falls").alive, 15, "the lost worker is seen")
    assert "nas" in shared.status("falls").log_tail
    assert shared.status("stays").alive
    wait_until(lambda: is_gone(pid), 15, "the lost worker is gone")
    wait_until(lambda: home.states()["nas"] == "ready", 60, "the cluster started it again")
    wait_until(lambda: "nas" in shared.nodes(), 20, "the node is back")
    shared.start(tiny("falls", "nas"))
    assert shared.status("falls").alive
    shared.stop("falls")
    shared.stop("stays")


@pytest.mark.soak
def test_a_killed_head_ends_everything_and_a_new_one_is_found(home: Hosts, shared: RayEngine) -> None:
    """Without a database of its own Ray's control service forgets: workers end, and start again once it is back."""
    shared.start(tiny("w", "nas"))
    pid = shared.status("w").pid or 0
    home.process("desk", "gcs_server").kill()
    wait_until(lambda: not shared.status("w").alive, 60, "the workers are dead to the engine")
    wait_until(lambda: is_gone(pid), 60, "the worker is gone")
    wait_until(lambda: shared.nodes() == ["desk", "nas"], 120, "attached to the new head")
    shared.start(tiny("w", "nas"))
    assert shared.status("w").alive
    shared.stop("w")
