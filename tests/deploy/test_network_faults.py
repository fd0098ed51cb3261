"""Faults of the network in a virtual home: cables out, one-way cuts, slow links. The sentence is the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.bench.lab import Host, Lab
from shardwise.bench.lab.state import lab_unavailable
from shardwise.cluster.local import LocalEngine
from shardwise.deploy import Deployment, Placement, RunOptions, launch
from shardwise.transport.faults import Fault
from shardwise.transport.shaping import LinkShape
from tests.deploy.faults import Watched, request, undisturbed

NUM_TOKENS = 80
LOST = LinkShape(loss=0.999999, loss_burst_packets=1e9)

pytestmark = pytest.mark.skipif(bool(lab_unavailable()), reason=f"needs network namespaces: {lab_unavailable()}")


@pytest.fixture(scope="module")
def home() -> Iterator[Lab]:
    with Lab([Host.on("ethernet_1g", name, relay=True) for name in ("desktop", "nas", "laptop")]) as lab:
        yield lab


@pytest.fixture(scope="module")
def deployment(home: Lab, sample_gguf: Path) -> Iterator[Deployment]:
    hosts = ("desktop", "nas", "laptop")
    engine = LocalEngine({name: tuple(home.prefix(name)) for name in hosts})
    places = [Placement(node=name, host=home.address(name)) for name in hosts]
    options = RunOptions(num_stages=3, context_tokens=512, deterministic=True)
    with launch(sample_gguf, options, engine=engine, placements=places, driver_host=home.operator_address) as built:
        yield built


def act(lab: Lab, fault: Fault) -> threading.Timer:
    """Carry a fault out and take it back after its duration."""
    host = fault.target
    if fault.kind == "cut":
        lab.cut(host)
        undo = threading.Timer(fault.duration_s, lab.restore, (host,))
    elif fault.kind == "one_way_cut":
        lab.set_access(host, up=LOST)
        undo = threading.Timer(fault.duration_s, lab.set_access, (host,), {"up": LinkShape()})
    else:
        assert fault.shape is not None
        lab.set_access(host, up=fault.shape, down=fault.shape)
        undo = threading.Timer(fault.duration_s, lab.set_access, (host,), {"up": LinkShape(), "down": LinkShape()})
    undo.start()
    return undo


@pytest.mark.parametrize(
    ("kind", "duration_s"), [("cut", 0.5), ("cut", 6.0), ("one_way_cut", 6.0), ("slow_link", 2.0)], ids=lambda v: str(v)
)
def test_the_same_tokens_through_network_faults(home: Lab, deployment: Deployment, kind: str, duration_s: float) -> None:
    wanted = undisturbed(deployment, request(deployment, num_tokens=NUM_TOKENS))
    before = len(deployment.recoveries)
    session = Watched(deployment, request(deployment, num_tokens=NUM_TOKENS))
    session.wait_for(10)
    shape = LinkShape(delay_s=0.05, bytes_per_s=250_000.0) if kind == "slow_link" else None
    target = deployment.stages[1].node
    undo = act(home, Fault(kind=kind, target=target, at_token=10, duration_s=duration_s, shape=shape))  # type: ignore[arg-type]
    try:
        assert session.ids() == wanted
    finally:
        undo.join()
    for recovery in deployment.recoveries[before:]:
        assert recovery.grade == "exact"
        print(f"{kind} {duration_s} s: {recovery.action}, stall {recovery.stall_s:.1f} s ({recovery.predicted_stall_s:.1f})")
    if kind == "slow_link":
        assert len(deployment.recoveries) == before, "a slow link is no fault"
