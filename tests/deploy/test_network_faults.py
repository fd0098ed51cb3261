"""Faults of the network in a virtual home: cables out, one-way cuts, slow links. The sentence is the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.bench.lab import Lab
from shardwise.deploy import Deployment
from shardwise.deploy.liveness import CUT_OFF_CAP_S
from shardwise.session.recovery import RecoveryPolicy
from shardwise.transport.faults import Fault
from shardwise.transport.shaping import LinkShape
from tests.deploy.actor import Actor, launch_at_home, make_home
from tests.deploy.faults import Watched, eventually, request, undisturbed
from tests.needs import needs_lab

NUM_TOKENS = 80

pytestmark = needs_lab


@pytest.fixture(scope="module")
def home() -> Iterator[Lab]:
    with make_home() as lab:
        yield lab


@pytest.fixture(scope="module")
def deployment(home: Lab, sample_gguf: Path) -> Iterator[Deployment]:
    with launch_at_home(home, sample_gguf, context_tokens=512, deterministic=True) as built:
        yield built


@pytest.mark.parametrize(
    ("kind", "duration_s"),
    [
        ("cut", 0.5),
        ("slow_link", 2.0),
        pytest.param("cut", 6.0, marks=pytest.mark.soak),
        pytest.param("one_way_cut", 6.0, marks=pytest.mark.soak),
    ],
)
def test_the_same_tokens_through_network_faults(home: Lab, deployment: Deployment, kind: str, duration_s: float) -> None:
    wanted = undisturbed(deployment, request(deployment, num_tokens=NUM_TOKENS))
    before = len(deployment.recoveries)
    session = Watched(deployment, request(deployment, num_tokens=NUM_TOKENS))
    session.wait_for(10)
    shape = LinkShape(delay_s=0.05, bytes_per_s=250_000.0) if kind == "slow_link" else None
    actor = Actor(home, deployment)
    actor.act(Fault(kind=kind, target="stage-1", at_token=10, duration_s=duration_s, shape=shape))  # type: ignore[arg-type]
    try:
        assert session.ids() == wanted
    finally:
        actor.join()
    for recovery in deployment.recoveries[before:]:
        assert recovery.grade == "exact"
        print(f"{kind} {duration_s} s: {recovery.action}, stall {recovery.stall_s:.1f} s ({recovery.predicted_stall_s:.1f})")
    if kind == "slow_link":
        assert len(deployment.recoveries) == before, "a slow link is no fault"


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["cut", "one_way_cut"])
def test_a_hot_replica_takes_over_from_a_machine_that_is_cut_off(home: Lab, sample_gguf: Path, kind: str) -> None:
    """Known by a step that is overdue and missing beats, before the stage counts as lost: the stall is reported."""
    policy = RecoveryPolicy(replicate="hot")
    with launch_at_home(home, sample_gguf, context_tokens=512, deterministic=True, recovery=policy) as built:
        eventually(lambda: len(built.driver.peers.replicas) == 3 and built.driver.connected, "replicas")
        wanted = undisturbed(built, request(built, num_tokens=NUM_TOKENS))
        session = Watched(built, request(built, num_tokens=NUM_TOKENS))
        session.wait_for(30)
        actor = Actor(home, built)
        actor.act(Fault(kind=kind, target="stage-1", at_token=30, duration_s=6.0))  # type: ignore[arg-type]
        try:
            assert session.ids() == wanted
        finally:
            actor.join()
        for recovery in built.recoveries:
            stall = f"stall {recovery.stall_s:.2f} s ({recovery.predicted_stall_s:.2f})"
            print(f"hot, {kind}: {recovery.cause}: {recovery.action}, {stall}")
        assert built.recoveries[0].action == "promote of stage 1"


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["cut", "one_way_cut"])
def test_the_driver_is_cut_off_for_longer_than_it_waits(home: Lab, deployment: Deployment, kind: str) -> None:
    """Restarts inside the cut reach nobody before it ends; then they do, and the sentence goes on."""
    wanted = undisturbed(deployment, request(deployment, num_tokens=NUM_TOKENS))
    session = Watched(deployment, request(deployment, num_tokens=NUM_TOKENS))
    session.wait_for(10)
    actor = Actor(home, deployment)
    actor.act(Fault(kind=kind, target="driver", at_token=10, duration_s=1.6 * CUT_OFF_CAP_S))  # type: ignore[arg-type]
    try:
        assert session.ids() == wanted
    finally:
        actor.join()
    for recovery in deployment.recoveries[-1:]:
        stall = f"stall {recovery.stall_s:.1f} s ({recovery.predicted_stall_s:.1f})"
        print(f"driver, {kind}: {recovery.cause}: {recovery.action}, {stall}")
    eventually(lambda: deployment.driver.connected and not deployment.driver.recovering, "standing again")
