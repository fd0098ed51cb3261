"""The state machine: each arrow of the drawing, then its invariants under random events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster.membership import (
    DEFAULT_POLICY,
    AnyEvent,
    BecameReady,
    DrainAsked,
    Ended,
    Heard,
    Joined,
    Left,
    Membership,
    NodeState,
    NotReady,
    SleepAnnounced,
    StepDone,
    StepLate,
    Tick,
    advance,
    forget,
)
from shardwise.records import from_json, to_json

J, R, S, D, A, G = NodeState


def after(*events: tuple[float, AnyEvent]) -> Membership:
    membership = Membership()
    for now_s, event in events:
        membership, _ = advance(membership, event, now_s)
    return membership


def state(membership: Membership, identity: str = "x") -> NodeState:
    member = membership.find(identity)
    assert member is not None
    return member.state


JOIN = (0.0, Joined(identity="x", name="nas"))
READY = (0.1, BecameReady(identity="x"))


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([JOIN], J),
        ([JOIN, READY], R),
        ([JOIN, READY, (1.5, Tick())], R),
        ([JOIN, READY, (1.7, Tick())], S),
        ([JOIN, READY, (1.7, Tick()), (1.8, Heard(identity="x"))], R),
        ([JOIN, READY, (1, Tick()), (1.7, Tick()), *[(t / 2, Tick()) for t in range(4, 22)]], G),
        ([JOIN, READY, (1, NotReady(identity="x", reason="lost"))], J),
        ([JOIN, READY, (1, NotReady(identity="x", reason="lost")), (1.1, Heard(identity="x"))], J),
        ([JOIN, READY, (1.7, Tick()), (1.8, NotReady(identity="x", reason="lost"))], S),
        ([JOIN, READY, (1.7, Tick()), (1.8, NotReady(identity="x", reason="lost")), (1.9, Heard(identity="x"))], J),
        ([JOIN, READY, (1, DrainAsked(identity="x")), (2, NotReady(identity="x", reason="lost"))], D),
        ([JOIN, READY, (1, StepLate(identity="x", waited_s=1, expected_s=0.01))], S),
        ([JOIN, READY, (1, StepLate(identity="x", waited_s=1, expected_s=0.01)), (1.1, Heard(identity="x"))], S),
        ([JOIN, READY, (1, StepLate(identity="x", waited_s=1, expected_s=0.01)), (1.1, StepDone(identity="x"))], R),
        ([JOIN, READY, (1, DrainAsked(identity="x"))], D),
        ([JOIN, READY, (1, DrainAsked(identity="x")), (2, BecameReady(identity="x"))], D),
        ([JOIN, READY, (1, DrainAsked(identity="x")), (3, Tick()), (3.1, Heard(identity="x"))], D),
        ([JOIN, READY, (1, DrainAsked(identity="x")), (2, Left(identity="x"))], G),
        ([JOIN, READY, (1, SleepAnnounced(identity="x")), (1.5, Tick()), (50_000, Tick())], A),
        ([JOIN, READY, (1, SleepAnnounced(identity="x")), (50_000, Heard(identity="x"))], J),
        ([JOIN, READY, (1, Ended(identity="x", reason="killed"))], G),
        ([JOIN, READY, (1, Ended(identity="x", reason="killed")), (2, Heard(identity="x")), (3, BecameReady(identity="x"))], R),
    ],
)
def test_arrows(events: list[tuple[float, AnyEvent]], expected: NodeState) -> None:
    assert state(after(*events)) is expected


def test_joining_takes_no_longer_than_allowed() -> None:
    beats = [(float(t), event) for t in range(1, 120) for event in (Heard(identity="x"), Tick())]
    assert state(after(JOIN, *beats)) is J
    membership = after(JOIN, *beats, (120.0, Tick()))
    assert state(membership) is G
    assert "not ready within" in membership.members[0].reason


def test_the_same_identity_replaces_itself_and_the_old_one_is_fenced() -> None:
    membership = after(JOIN, READY, (5, Joined(identity="x", name="nas", address="10.0.0.9")))
    (member,) = membership.members
    assert (member.incarnation, member.state, member.address) == (2, J, "10.0.0.9")
    for stale in (BecameReady(identity="x", incarnation=1), Left(identity="x", incarnation=1)):
        assert advance(membership, stale, 6.0) == (membership, ())
    membership, changes = advance(membership, BecameReady(identity="x", incarnation=2), 6.0)
    assert [(c.before, c.after) for c in changes] == [(J, R)]


def test_a_name_belongs_to_its_first_holder_until_that_one_is_gone() -> None:
    second = (1.0, Joined(identity="y", name="nas"))
    assert [m.name for m in after(JOIN, second).members] == ["nas", "nas-2"]
    assert [m.name for m in after(JOIN, (0.5, Left(identity="x")), second).members] == ["nas", "nas"]
    returned = after(JOIN, (0.5, Left(identity="x")), second, (2.0, Heard(identity="x")))
    assert [m.name for m in returned.members] == ["nas-2", "nas"]
    assert after(JOIN, second).named("nas-2") == after(JOIN, second).find("y")
    assert forget(after(JOIN, second), "x").find("x") is None


def test_an_observer_that_slept_blames_nobody() -> None:
    membership = after(JOIN, READY, (0.5, Tick()), (3600.0, Tick()))
    assert state(membership) is R
    assert state(advance(membership, Tick(), 3600.9)[0]) is R
    later, _ = advance(membership, Tick(), 3600.9)
    assert state(advance(later, Tick(), 3601.8)[0]) is S


def test_events_about_strangers_change_nothing() -> None:
    assert advance(Membership(), Heard(identity="who"), 1.0) == (Membership(), ())


def test_it_survives_json() -> None:
    membership = after(JOIN, READY, (1.7, Tick()))
    assert from_json(to_json(membership), Membership) == membership


IDS = st.sampled_from(["x", "y", "z"])
EVENTS = st.one_of(
    st.builds(Joined, identity=IDS, name=st.sampled_from(["nas", "desk"]), incarnation=st.integers(0, 5)),
    st.builds(Heard, identity=IDS, incarnation=st.integers(0, 5)),
    st.builds(BecameReady, identity=IDS),
    st.builds(StepLate, identity=IDS, waited_s=st.just(1.0), expected_s=st.just(0.1)),
    *[st.builds(kind, identity=IDS) for kind in (StepDone, DrainAsked, SleepAnnounced, Left)],
    st.builds(NotReady, identity=IDS, reason=st.just("lost")),
    st.builds(Ended, identity=IDS, reason=st.just("killed")),
    st.just(Tick()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.floats(0, 4)), max_size=60))
def test_invariants(steps: list[tuple[AnyEvent, float]]) -> None:
    """Names of the living are unique, incarnations only grow, a transition is told exactly when something changed."""
    membership, now_s = Membership(), 0.0
    for event, pause_s in steps:
        now_s += pause_s
        before = {m.identity: m for m in membership.members}
        membership, changes = advance(membership, event, now_s)
        living = [m.name for m in membership.members if m.state is not G]
        assert len(set(living)) == len(living)
        assert len({m.identity for m in membership.members}) == len(membership.members)
        for member in membership.members:
            old = before.get(member.identity)
            assert old is None or member.incarnation >= old.incarnation
            moved = old is None or (old.state, old.incarnation) != (member.state, member.incarnation)
            assert moved == any(c.identity == member.identity for c in changes)
            assert member.heard_s <= now_s
            if isinstance(event, Tick) and member.state is R:
                assert now_s - member.heard_s < DEFAULT_POLICY.suspect_after_s
