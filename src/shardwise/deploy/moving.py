"""One stage moves to a fresh worker, on another node or the same, while sessions run.

A replica starts at the new place -> it stands by -> it is promoted under a new epoch and refilled by its neighbour -> the old
worker ends. **Fails when** the new worker does not come up: then the old one simply goes on. **Called by** `Deployment`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.cluster.engine import ClusterEngine
from shardwise.deploy.options import Placement
from shardwise.deploy.workers import Layout, Replica, crash_error
from shardwise.errors import ReplyTimeout, StageError
from shardwise.session.recovery import RecoveryAction

if TYPE_CHECKING:
    from shardwise.deploy.deployment import Deployment

LOOK_S = 0.1


def place_for(layout: Layout, engine: ClusterEngine, node: str) -> Placement | None:
    """How to run something on a node: as it is done already, or by its address in the cluster; None where neither is known."""
    if (known := layout.place_on(node)) is not None:
        return known
    address = next((info.address for info in engine.node_infos() if info.name == node), "")
    return Placement(node=node, host=address) if address else None


def move_stage(deployment: Deployment, stage: int, place: Placement) -> None:
    """See the module; returns when the new worker serves."""
    layout, engine, supervisor = deployment.layout, deployment.engine, deployment.supervisor
    kept = layout.replicas.get(stage)
    name = kept.name if kept is not None else f"{layout.names[stage].partition('-next')[0]}-next{deployment.next_generation()}"
    with deployment.changing:
        deployment.driver.peers.replicas.pop(stage, None)
        layout.replicas[stage] = Replica(name, place)
        deployment.start_replica(stage)
    try:
        _await_standing(deployment, stage, name)
    except BaseException:
        engine.stop(name, grace_s=0.0)
        if kept is None:
            layout.replicas.pop(stage, None)
        raise
    what = f"stage {stage} moves to {place.node or 'a new worker'}"
    action = RecoveryAction(kind="promote", stage=stage, node=place.node, predicted_stall_s=deployment.available(stage).refill_s)
    assert supervisor is not None
    with deployment.changing:
        fault = supervisor.carry_out(action, what, (stage,))
    if fault is not None:
        supervisor.report(fault)


def _await_standing(deployment: Deployment, stage: int, name: str) -> None:
    driver = deployment.driver
    end_s = driver.clock.now_s() + deployment.options.start_timeout_s
    while stage not in driver.peers.replicas:
        status = deployment.engine.status(name)
        if not status.alive:
            raise crash_error(name, status.exit_status, status.log_tail)
        if driver.failure is not None:
            raise driver.failure
        if driver.clock.now_s() > end_s:
            raise ReplyTimeout("the new worker did not come up", where=name, hint="raise --start-timeout")
        driver.wait_changed(LOOK_S)
    if stage >= driver.num_stages:
        raise StageError("the split has changed meanwhile", where=name)
