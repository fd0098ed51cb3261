"""A deployment changes under load: other splits, other workers, other nodes. No request is lost, the tokens are the same."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.cluster.engine import NodeInfo
from shardwise.cluster.local import LocalEngine
from shardwise.deploy import Deployment, Placement, RunOptions, launch, launch_local
from shardwise.errors import UsageError
from shardwise.session.recovery import RecoveryPolicy
from tests.deploy.faults import Watched, request, undisturbed

NUM_TOKENS = 60


@pytest.fixture(scope="module")
def deployment(sample_gguf: Path) -> Iterator[Deployment]:
    with launch_local(sample_gguf, num_stages=2, context_tokens=512, deterministic=True) as built:
        yield built


@pytest.mark.parametrize("layers", [(10, 10, 10), pytest.param((30,), marks=pytest.mark.soak), (12, 18)])
def test_a_new_split_under_load(deployment: Deployment, layers: tuple[int, ...]) -> None:
    """Grow, shrink, move layers; one session is being generated, another one is asked for meanwhile."""
    wanted = undisturbed(deployment, request(deployment, num_tokens=NUM_TOKENS))
    sampled = undisturbed(deployment, request(deployment, sampling="sampled"))
    session = Watched(deployment, request(deployment, num_tokens=NUM_TOKENS))
    session.wait_for(5)
    change = threading.Thread(target=deployment.relayout, args=(layers,))
    change.start()
    other = Watched(deployment, request(deployment, sampling="sampled"))
    change.join()
    assert other.ids() == sampled
    assert session.ids() == wanted
    assert [s.layers[1] - s.layers[0] for s in deployment.stages] == list(layers)
    assert all(s.state == "ready" for s in deployment.stages)
    assert len(deployment.engine.statuses()) == len(layers)


def test_a_worker_is_replaced_under_load(deployment: Deployment) -> None:
    wanted = undisturbed(deployment, request(deployment))
    session = Watched(deployment, request(deployment))
    session.wait_for(5)
    before = [s.pid for s in deployment.stages]
    deployment.replace_worker(0)
    assert session.ids() == wanted
    after = [s.pid for s in deployment.stages]
    assert after[0] != before[0]
    assert after[1:] == before[1:]
    assert len(deployment.engine.statuses()) == len(after)


def test_an_impossible_split_changes_nothing(deployment: Deployment) -> None:
    before = [s.pid for s in deployment.stages]
    with pytest.raises(UsageError, match="add up to 31"):
        deployment.relayout((1, 30))
    with pytest.raises(UsageError, match="no other node"):
        deployment.drain("local")
    assert [s.pid for s in deployment.stages] == before
    assert len(list(deployment.generate("Hello", max_tokens=3, ignore_eos=True))) == 3


class Nodes(LocalEngine):
    """Three nodes on this machine, some of which can be taken away."""

    def __init__(self) -> None:
        super().__init__({"desktop": (), "laptop": (), "nas": ()})
        self.gone: set[str] = set()
        self.free_bytes = 0

    def nodes(self) -> list[str]:
        return [name for name in super().nodes() if name not in self.gone]

    def node_infos(self) -> list[NodeInfo]:
        return [NodeInfo(name=name, address="127.0.0.1", memory_bytes=self.free_bytes) for name in self.nodes()]


@pytest.fixture
def on_nodes(sample_gguf: Path) -> Iterator[Deployment]:
    options = RunOptions(num_stages=3, context_tokens=512, deterministic=True, recovery=RecoveryPolicy(fallback_model="sample"))
    places = [Placement(node=name) for name in ("desktop", "laptop", "nas")]
    with launch(sample_gguf, options, engine=Nodes(), placements=places) as built:
        yield built


def test_a_node_goes_and_the_others_take_over(on_nodes: Deployment) -> None:
    """Drained, then lost with room elsewhere, then lost without: moved, restarted on another node, planned again, fallback."""
    engine = on_nodes.engine
    assert isinstance(engine, Nodes)
    wanted = undisturbed(on_nodes, request(on_nodes, num_tokens=NUM_TOKENS))

    session = Watched(on_nodes, request(on_nodes, num_tokens=NUM_TOKENS))
    session.wait_for(5)
    on_nodes.drain("laptop")
    assert session.ids() == wanted
    assert "laptop" not in {s.node for s in on_nodes.stages}

    for free_bytes, action in ((0, "restart of stage 2"), (100 * 2**20, "replan"), (1, "fallback")):
        engine.free_bytes = free_bytes
        session = Watched(on_nodes, request(on_nodes, num_tokens=NUM_TOKENS))
        session.wait_for(5)
        last = on_nodes.stages[-1]
        engine.gone.add(last.node)
        os.kill(last.pid, signal.SIGKILL)
        assert session.ids() == wanted  # the fallback here is the same model, so that its tokens can be compared too
        recovery = on_nodes.recoveries[-1]
        assert recovery.action == action
        assert recovery.grade == ("fallback" if action == "fallback" else "exact")
        assert (on_nodes.degraded != "") == (action == "fallback")
        print(f"{action}: stall {recovery.stall_s:.2f} s, predicted {recovery.predicted_stall_s:.2f} s")
        engine.gone.clear()
