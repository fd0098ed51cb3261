"""What is decided about a fault; pure, so every case can be written down."""

from __future__ import annotations

import itertools

import pytest

from shardwise.records import replace
from shardwise.session.recovery import DETECTION_S, RECONNECTION_S, Available, Cause, Incident, RecoveryPolicy, next_action

CRASH = Incident(cause=Cause.CRASHED, stage=1)
HERE = Available(node="nas", restart_s=1.0, refill_s=2.0, fast_refill_s=0.5)


def ladder(incident: Incident, policy: RecoveryPolicy, available: Available) -> list[str]:
    """Every action until it gives up, each one failing."""
    out = []
    for _ in range(20):
        action = next_action(incident, policy, available)
        out.append(action.name)
        if action.kind == "give_up":
            return out
        incident = replace(incident, tried=(*incident.tried, action.name))
    raise AssertionError("it never gives up")


def test_the_ladder_from_cheap_to_last() -> None:
    available = replace(HERE, hot_replica="laptop", other_nodes=("desktop", "nas"), replan_layers=(10, 20), fallback=True)
    assert ladder(CRASH, RecoveryPolicy(), available) == [
        "promote:laptop",
        "restart:nas",
        "restart:desktop",
        "replan:",
        "fallback:",
        "give_up:",
    ]


def test_a_dead_machine_is_not_restarted_on() -> None:
    assert ladder(CRASH, RecoveryPolicy(), replace(HERE, node_alive=False)) == ["give_up:"]


def test_a_stuck_path_is_reconnected_first() -> None:
    assert ladder(Incident(cause=Cause.STUCK, stage=1), RecoveryPolicy(), HERE)[:2] == ["reconnect:", "restart:nas"]


def test_policy_off_gives_up_at_once_and_says_why() -> None:
    action = next_action(CRASH, RecoveryPolicy(recovery="off"), HERE)
    assert action.kind == "give_up"
    assert "forbids" in action.reason
    assert "stage 1" in action.reason


def test_the_deadline_holds() -> None:
    late = replace(CRASH, elapsed_s=121.0)
    assert next_action(late, RecoveryPolicy(), HERE).kind == "give_up"


@pytest.mark.parametrize(
    ("recovery", "refill_s", "grade"),
    [("exact", 900.0, "exact"), ("fast", 1.0, "fast"), ("auto", 2.0, "exact"), ("auto", 900.0, "fast")],
)
def test_grades(recovery: str, refill_s: float, grade: str) -> None:
    action = next_action(CRASH, RecoveryPolicy(recovery=recovery), replace(HERE, refill_s=refill_s))
    assert action.grade == grade
    seen_s = DETECTION_S[Cause.CRASHED] + RECONNECTION_S
    assert action.predicted_stall_s == pytest.approx(seen_s + 1.0 + (refill_s if grade == "exact" else 0.5))


def test_a_standby_replica_is_refilled_and_a_hot_one_is_not() -> None:
    available = replace(HERE, hot_replica="laptop")
    hot = next_action(CRASH, RecoveryPolicy(), available)
    standby = next_action(CRASH, RecoveryPolicy(), replace(available, replica_holds_kv=False))
    assert hot.kind == standby.kind == "promote"
    assert standby.predicted_stall_s - hot.predicted_stall_s == pytest.approx(HERE.refill_s)


def test_it_always_ends_and_never_repeats() -> None:
    for hot, alive, replan, fallback, cause in itertools.product(("", "a"), (True, False), ((), (1, 2)), (True, False), Cause):
        available = replace(HERE, hot_replica=hot, node_alive=alive, replan_layers=replan, fallback=fallback)
        actions = ladder(Incident(cause=cause, stage=0), RecoveryPolicy(), available)
        assert len(set(actions)) == len(actions)
