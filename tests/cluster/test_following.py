"""When a deployment plans anew and when it moves: pure, on a clock of the test's own."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cluster.follow_policy import FollowPolicy
from shardwise.cluster.following import (
    Watch,
    after_planning,
    is_due,
    leaving_nodes,
    moved,
    noticed,
    usable_nodes,
)
from shardwise.cluster.membership import Member, NodeState
from shardwise.cluster.reconcile import Proposal

POLICY = FollowPolicy(auto=True, settle_s=3.0, between_moves_s=60.0, retry_s=600.0)


def member(name: str, state: NodeState) -> Member:
    return Member(identity=name, name=name, incarnation=1, state=state, since_s=0, heard_s=0)


def proposal(gain: float) -> Proposal:
    return Proposal(
        worthwhile=gain >= 0.1,
        gain_share=gain,
        decode_tokens_per_s=(1.0, 2.0),
        time_to_first_token_s=(1.0, 0.5),
        nodes_added=(),
        nodes_dropped=(),
        transfers=(),
        total_bytes=0,
        message="",
    )


def test_who_may_get_work() -> None:
    up = ("desk", "nas", "pi", "tower", "foreign")
    members = (
        member("desk", NodeState.READY),
        member("nas", NodeState.SUSPECT),
        member("pi", NodeState.DRAINING),
        member("tower", NodeState.SUSPECT),
        member("attic", NodeState.READY),  # Ray does not have it yet
    )
    assert usable_nodes(up, members, before=("nas",)) == ("desk", "foreign", "nas")
    assert leaving_nodes(members) == ("pi",)


def test_machines_that_come_together_are_one_change() -> None:
    watch = noticed(Watch(), ("desk",), 0, 0.0, POLICY)
    watch = noticed(watch, ("desk", "nas"), 0, 2.0, POLICY)
    assert not is_due(watch, 4.9)
    watch = noticed(watch, ("desk", "nas"), 0, 4.9, POLICY)
    assert is_due(watch, 5.0)
    watch, wanted = after_planning(watch, proposal(0.05), 5.0, POLICY)
    assert not wanted
    assert not is_due(noticed(watch, ("desk", "nas"), 0, 9.0, POLICY), 1e6)  # nothing new
    assert is_due(noticed(watch, ("desk", "nas"), 1, 9.0, POLICY), 12.0)  # measured again


@pytest.mark.parametrize(("auto", "gain", "expected"), [(True, 0.2, True), (True, 0.09, False), (False, 0.9, False)])
def test_only_with_consent_and_gain(auto: bool, gain: float, expected: bool) -> None:
    policy = FollowPolicy(auto=auto)
    assert after_planning(noticed(Watch(), ("a",), 0, 0.0, policy), proposal(gain), 10.0, policy)[1] is expected


def test_too_soon_is_looked_at_again_and_a_failed_move_waits_longer() -> None:
    watch = moved(noticed(Watch(), ("a",), 0, 0.0, POLICY), 10.0, POLICY, failed=False)
    watch, wanted = after_planning(watch, proposal(0.5), 20.0, POLICY)
    assert not wanted
    assert watch.due_s == 70.0
    watch, wanted = after_planning(watch, proposal(0.5), 70.0, POLICY)
    assert wanted
    watch = moved(watch, 71.0, POLICY, failed=True)
    assert watch.due_s == watch.not_before_s == 671.0
    assert after_planning(watch, proposal(0.5), 672.0, POLICY)[1]


@given(st.lists(st.tuples(st.floats(0.1, 40.0), st.sets(st.sampled_from("abcd"), min_size=1), st.floats(0, 1)), max_size=60))
def test_moves_are_never_closer_than_agreed(steps: list[tuple[float, set[str], float]]) -> None:
    """Whatever the machines do."""
    watch, now_s, moves = Watch(), 0.0, [-math.inf]
    for pause_s, nodes, gain in steps:
        now_s += pause_s
        watch = noticed(watch, tuple(sorted(nodes)), 0, now_s, POLICY)
        if not is_due(watch, now_s):
            continue
        watch, wanted = after_planning(watch, proposal(gain), now_s, POLICY)
        if wanted:
            assert gain >= 0.1
            assert now_s - moves[-1] >= POLICY.between_moves_s
            moves.append(now_s)
            watch = moved(watch, now_s, POLICY, failed=False)
