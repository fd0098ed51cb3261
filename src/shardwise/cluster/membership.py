"""Who belongs to the cluster and in what state: a pure state machine over events.

Events and the observer's own clock flow in; a new `Membership` and the `Transition`s that happened flow out. There is
no clock, socket or random here, and times of other machines are never looked at, so clock skew has no effect.

    joining --ready--> ready --silence or late step--> suspect --silence--> gone
       ^ <--not ready--  |  \\--drain--> draining --left--> gone               |
       |                 \\--sleep announced--> asleep                         |
       \\------------- heard again (asleep, gone) -----------------------------/

A member is an *identity* (the fingerprint of a node's key, or a worker's name): a second join of an identity replaces
the first under a higher incarnation, and whatever still speaks for a lower incarnation is ignored. A name that another
identity holds gets a number ("nas-2"): no ghost ever blocks a newcomer.

**Promises** a total function: events about unknown members or old incarnations change nothing. **Called by** the
cluster's coordinator (nodes), recovery (workers), the simulator.
"""

from __future__ import annotations

from enum import StrEnum

from shardwise.records import Record, replace


class NodeState(StrEnum):
    """Where a member is in its life."""

    JOINING = "joining"  # accepted, not yet usable
    READY = "ready"  # work can be placed there
    SUSPECT = "suspect"  # silent, or a step is late
    DRAINING = "draining"  # finishes what it has, gets nothing new
    ASLEEP = "asleep"  # said so; expected back
    GONE = "gone"


LEFT = "it left"  # why one that said goodbye for good is gone
USABLE = frozenset({NodeState.READY})
REACHABLE = frozenset({NodeState.JOINING, NodeState.READY, NodeState.DRAINING})


class Policy(Record):
    """Seconds on the observer's clock."""

    suspect_after_s: float = 1.5  # without a sign of life
    gone_after_s: float = 10.0  # without a sign of life
    join_within_s: float = 120.0  # from joining to ready
    observer_pause_s: float = 1.0  # a longer gap between ticks means that the observer itself slept


DEFAULT_POLICY = Policy()


class Member(Record):
    """One participant as the observer sees it."""

    identity: str
    name: str
    incarnation: int
    state: NodeState
    since_s: float  # of the state
    heard_s: float  # last sign of life
    address: str = ""
    reason: str = ""
    before_suspect: NodeState = NodeState.READY
    late_step: bool = False  # a step is overdue: signs of life alone do not clear it


class Membership(Record):
    """All members, the gone ones included until they are forgotten."""

    members: tuple[Member, ...] = ()
    ticked_s: float | None = None

    def find(self, identity: str) -> Member | None:
        """The member of that identity, or None."""
        return next((m for m in self.members if m.identity == identity), None)

    def named(self, name: str) -> Member | None:
        """The member of that name, or None."""
        return next((m for m in self.members if m.name == name), None)

    def usable(self) -> tuple[Member, ...]:
        """Those that may get new work."""
        return tuple(m for m in self.members if m.state in USABLE)


class Transition(Record):
    """A change of state, for logs, dashboards and recovery."""

    identity: str
    name: str
    before: NodeState | None  # None: it was not there
    after: NodeState
    at_s: float
    reason: str


class Event(Record, tag_field="event"):
    """Base of all events."""

    identity: str = ""
    incarnation: int = 0  # 0 = whatever is current


class Joined(Event, tag="joined"):
    """A node was accepted, or came back as a new incarnation or under a new address."""

    name: str
    address: str = ""


class Heard(Event, tag="heard"):
    """A sign of life."""

    address: str = ""


class BecameReady(Event, tag="ready"):
    """It can take work."""


class NotReady(Event, tag="not_ready"):
    """It is there, but cannot take work."""

    reason: str


class StepLate(Event, tag="late"):
    """A step is overdue: `waited_s` against the `expected_s` of the plan's prediction."""

    waited_s: float
    expected_s: float


class StepDone(Event, tag="done"):
    """The overdue step came through."""


class DrainAsked(Event, tag="drain"):
    """It shall get nothing new."""


class SleepAnnounced(Event, tag="sleep"):
    """It said that it goes to sleep."""


class Left(Event, tag="left"):
    """It said goodbye."""


class Ended(Event, tag="ended"):
    """Its process ended or its machine was seen to be gone."""

    reason: str


class Tick(Event, tag="tick"):
    """Time has passed."""


AnyEvent = Joined | Heard | BecameReady | NotReady | StepLate | StepDone | DrainAsked | SleepAnnounced | Left | Ended | Tick
Result = tuple[Membership, tuple[Transition, ...]]


def advance(membership: Membership, event: AnyEvent, now_s: float, policy: Policy = DEFAULT_POLICY) -> Result:
    """The membership after one event, and what changed."""
    if isinstance(event, Tick):
        return _tick(membership, now_s, policy)
    member = membership.find(event.identity)
    if isinstance(event, Joined):
        return _store(membership, member, _joined(membership, member, event, now_s), now_s)
    if member is None or 0 < event.incarnation < member.incarnation:
        return membership, ()
    changed = _changed(member, event, now_s)
    if member.state is NodeState.GONE and changed.state is not NodeState.GONE:  # its name may have been taken since
        changed = replace(changed, name=free_name(membership, changed.name, changed.identity))
    return _store(membership, member, changed, now_s)


def forget(membership: Membership, identity: str) -> Membership:
    """Without a member (revoked, or gone for good)."""
    return replace(membership, members=tuple(m for m in membership.members if m.identity != identity))


def _joined(membership: Membership, old: Member | None, event: Joined, now_s: float) -> Member:
    incarnation = max(event.incarnation, old.incarnation + 1 if old is not None else 1)
    return Member(
        identity=event.identity,
        name=free_name(membership, event.name, event.identity),
        incarnation=incarnation,
        state=NodeState.JOINING,
        since_s=now_s,
        heard_s=now_s,
        address=event.address,
        reason="joined" if old is None else "joined again",
    )


def free_name(membership: Membership, wanted: str, identity: str) -> str:
    """The wanted name, or with the first number that no other identity holds. Members that are gone hold nothing."""
    taken = {m.name for m in membership.members if m.identity != identity and m.state is not NodeState.GONE}
    name, number = wanted, 2
    while name in taken:
        name, number = f"{wanted}-{number}", number + 1
    return name


def _changed(member: Member, event: AnyEvent, now_s: float) -> Member:
    heard = replace(member, heard_s=now_s)
    match event:
        case Heard():
            return _heard(replace(heard, address=event.address or member.address), now_s)
        case BecameReady():
            fresh = member.state in (NodeState.JOINING, NodeState.SUSPECT, NodeState.ASLEEP, NodeState.GONE)
            return _to(replace(heard, late_step=False), NodeState.READY, now_s, "ready") if fresh else heard
        case NotReady():
            return _not_ready(member, now_s, event.reason)
        case StepLate():
            reason = f"a step took {event.waited_s:.3g} s where {event.expected_s:.3g} s were expected"
            return _suspect(replace(member, late_step=True), now_s, reason)
        case StepDone():
            return _heard(replace(heard, late_step=False), now_s)
        case DrainAsked():
            alive = member.state in (NodeState.JOINING, NodeState.READY, NodeState.SUSPECT)
            return _to(replace(member, late_step=False), NodeState.DRAINING, now_s, "drain was asked for") if alive else member
        case SleepAnnounced():
            return _to(heard, NodeState.ASLEEP, now_s, "it announced sleep")
        case Left():
            return _to(heard, NodeState.GONE, now_s, LEFT)
        case Ended():
            return _to(member, NodeState.GONE, now_s, event.reason)
        case _:
            return member


def _not_ready(member: Member, now_s: float, reason: str) -> Member:
    """Ready no more, nor as soon as a suspect one answers. No sign of life."""
    if member.state is NodeState.SUSPECT and member.before_suspect is NodeState.READY:
        return replace(member, before_suspect=NodeState.JOINING)
    return _to(member, NodeState.JOINING, now_s, reason) if member.state is NodeState.READY else member


def _heard(member: Member, now_s: float) -> Member:
    """A sign of life clears silence, not a late step; who was asleep or gone has to become ready again."""
    if member.state is NodeState.SUSPECT and not member.late_step:
        return _to(member, member.before_suspect, now_s, "it answers again")
    if member.state in (NodeState.ASLEEP, NodeState.GONE):
        return _to(member, NodeState.JOINING, now_s, "it came back")
    return member


def _suspect(member: Member, now_s: float, reason: str) -> Member:
    if member.state not in REACHABLE:
        return member
    return _to(replace(member, before_suspect=member.state), NodeState.SUSPECT, now_s, reason)


def _to(member: Member, state: NodeState, now_s: float, reason: str) -> Member:
    return member if member.state is state else replace(member, state=state, since_s=now_s, reason=reason)


def _store(membership: Membership, old: Member | None, new: Member, now_s: float) -> Result:
    if new == old:
        return membership, ()
    others = [m for m in membership.members if m.identity != new.identity]
    position = membership.members.index(old) if old is not None else len(others)
    members = (*others[:position], new, *others[position:])
    changed = old is None or old.state is not new.state or old.incarnation != new.incarnation
    transition = Transition(
        identity=new.identity,
        name=new.name,
        before=old.state if old is not None else None,
        after=new.state,
        at_s=now_s,
        reason=new.reason,
    )
    return replace(membership, members=members), (transition,) if changed else ()


def _tick(membership: Membership, now_s: float, policy: Policy) -> Result:
    """Judge silences. Where the observer itself was away, that gap counts for nobody."""
    away_s = 0.0 if membership.ticked_s is None else now_s - membership.ticked_s
    pause_s = away_s if away_s > policy.observer_pause_s else 0.0
    membership = replace(membership, ticked_s=now_s)
    transitions: list[Transition] = []
    for member in membership.members:
        shifted = replace(member, heard_s=min(now_s, member.heard_s + pause_s), since_s=min(now_s, member.since_s + pause_s))
        membership, changes = _store(membership, member, _judged(shifted, now_s, policy), now_s)
        transitions += changes
    return membership, tuple(transitions)


def _judged(member: Member, now_s: float, policy: Policy) -> Member:
    silent_s = now_s - member.heard_s
    if member.state in (NodeState.ASLEEP, NodeState.GONE):
        return member
    if silent_s >= policy.gone_after_s:
        return _to(member, NodeState.GONE, now_s, f"silent for {silent_s:.3g} s")
    if member.state is NodeState.JOINING and now_s - member.since_s >= policy.join_within_s:
        return _to(member, NodeState.GONE, now_s, f"not ready within {policy.join_within_s:g} s")
    if silent_s >= policy.suspect_after_s:
        return _suspect(member, now_s, f"silent for {silent_s:.3g} s")
    return member
