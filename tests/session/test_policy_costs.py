"""What policies cost and save, from a plan; and that `plan` and `advise` say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.cli.main import run
from shardwise.planner.types import Plan, PlanRequest
from shardwise.records import replace
from shardwise.session.policy_costs import DRIVER, PolicyCost, policy_costs
from shardwise.session.recovery import DETECTION_S, RECONNECTION_S, Cause

CLUSTER = """
[[node]]
name = "desk"
memory = "{desk}"
memory_bandwidth = "20 GB/s"
compute = "0.2 TFLOP/s"
[[node]]
name = "nas"
memory = "{nas}"
memory_bandwidth = "10 GB/s"
compute = "0.1 TFLOP/s"
disk_bandwidth = "0.1 GB/s"
[[link]]
between = ["desk", "nas"]
bandwidth = "1 Gbit/s"
latency = "0.3 ms"
"""


def found(tmp_path: Path, desk: str, nas: str) -> tuple[PlanRequest, Plan, dict[str, PolicyCost]]:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER.format(desk=desk, nas=nas))
    workload = sw.Workload(prompt_tokens=512, output_tokens=1000, num_users=2)
    request = sw.PlanRequest(model=sw.describe_model("llama-3.2-1b:q4_k_m"), cluster=sw.load_cluster(file), workload=workload)
    plan = sw.find_plan(request)
    return request, plan, {cost.policy: cost for cost in policy_costs(request, plan)}


def test_costs_and_savings_of_a_split(tmp_path: Path) -> None:
    request, plan, costs = found(tmp_path, "0.8 GiB", "1 GiB")
    assert plan.predicted is not None
    assert len(plan.stages) == 2
    assert list(costs) == ["none", "checkpoints", "standby", "hot"]
    seen_s = DETECTION_S[Cause.CRASHED] + RECONNECTION_S
    worst = max(2 * (s.compute_s.prefill_total + 1000 * s.compute_s.decode_p50) for s in plan.predicted.stages)
    assert costs["hot"].stall.killed_s == pytest.approx(seen_s)
    assert costs["standby"].stall.killed_s == pytest.approx(seen_s + worst)
    assert costs["none"].stall.killed_s > costs["standby"].stall.killed_s > costs["checkpoints"].stall.killed_s
    assert costs["none"].saves_s == 0
    assert costs["hot"].saves_s > costs["checkpoints"].saves_s > costs["standby"].saves_s > 0
    by_node = {one.node: one.extra_bytes for one in costs["hot"].memory}
    assert by_node == {
        plan.stages[1].node: plan.stages[0].ranks[0].total_bytes,
        plan.stages[0].node: plan.stages[1].ranks[0].total_bytes,
    }
    assert not costs["hot"].fits  # these machines are full with one copy
    (kept,) = costs["checkpoints"].memory
    assert kept.node == DRIVER
    assert kept.extra_bytes == pytest.approx(request.model.kv_bytes_per_token() * 1512 * 2, rel=1e-6)


def test_large_machines_have_room_for_replicas_and_what_cannot_run_costs_nothing(tmp_path: Path) -> None:
    request, plan, costs = found(tmp_path, "16 GiB", "16 GiB")
    assert costs["hot"].fits
    assert policy_costs(request, replace(plan, strategy="tensor_parallel")) == ()
    assert policy_costs(request, replace(plan, predicted=None)) == ()


@pytest.mark.parametrize("command", ["plan", "advise"])
def test_commands_tell_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER.format(desk="0.8 GiB", nas="1 GiB"))
    arguments = [command, "llama-3.2-1b:q4_k_m", "--cluster", str(file)]
    assert run(["--json", *arguments]) == 0
    policies = json.loads(capsys.readouterr().out)["policies"]
    assert [policy["policy"] for policy in policies] == ["none", "checkpoints", "standby", "hot"]
    assert {"memory", "extra_bytes", "fits", "stall", "saves_s", "flags"} <= set(policies[0])
    assert run(arguments) == 0
    assert "--replicate hot" in capsys.readouterr().out
