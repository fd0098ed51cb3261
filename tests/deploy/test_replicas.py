"""Hot and standby replicas take over from a lost stage; new replicas come up after them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from shardwise.deploy import Deployment, launch_local
from shardwise.session.recovery import RecoveryPolicy
from tests.deploy.faults import Watched, eventually, request, undisturbed


def standing(deployment: Deployment, num: int) -> bool:
    return len(deployment.driver.peers.replicas) == num and deployment.driver.connected and not deployment.driver.recovering


@pytest.mark.parametrize(("replicate", "limit_s"), [("hot", 1.0), pytest.param("standby", 5.0, marks=pytest.mark.soak)])
def test_replicas_take_over(sample_gguf: Path, replicate: str, limit_s: float) -> None:
    """Each stage in turn, killed and stopped; the stall is reported beside its prediction."""
    policy = RecoveryPolicy(replicate=replicate)
    with launch_local(sample_gguf, num_stages=2, context_tokens=512, deterministic=True, recovery=policy) as built:
        wanted = {s: undisturbed(built, request(built, sampling=s)) for s in ("greedy", "sampled")}
        for stage, fault, sampling in ((0, "SIGKILL", "sampled"), (1, "SIGKILL", "greedy"), (1, "SIGSTOP", "sampled")):
            eventually(lambda: standing(built, 2), "standing by")
            session = Watched(built, request(built, sampling=sampling))
            session.wait_for(15)
            os.kill(built.stages[stage].pid, signal.Signals[fault])
            assert session.ids() == wanted[sampling]
            recovery = built.recoveries[-1]
            assert recovery.action == f"promote of stage {stage}"
            assert recovery.grade == "exact"
            assert 0 < recovery.predicted_stall_s < 10
            print(
                f"{replicate} {fault} stage {stage}: stall {recovery.stall_s:.2f} s, predicted {recovery.predicted_stall_s:.2f} s"
            )
            assert recovery.stall_s < 20 * limit_s  # on a machine that is shared; the limits themselves are shown by the bench


def test_a_replica_that_dies_is_started_again(sample_gguf: Path) -> None:
    policy = RecoveryPolicy(replicate="standby")
    with launch_local(sample_gguf, num_stages=2, context_tokens=512, recovery=policy) as built:
        for stage, replica in built.driver.peers.replicas.items():  # what a policy is said to cost: each stage once more
            first = built.driver.peers.ready[stage]
            assert (replica.weight_bytes, replica.kv_bytes) == (first.weight_bytes, first.kv_bytes)
        dead = built.driver.peers.replicas[1].pid
        os.kill(dead, signal.SIGKILL)
        eventually(lambda: built.driver.peers.replicas[1].pid != dead, "a new replica")
        assert len(list(built.generate("Hello", max_tokens=4, ignore_eos=True))) == 4
