"""What to do about a fault, as a pure function: data in, one action out. No clock, socket or process here.

    incident (what happened, to which stage, what was tried) + policy + what is available -> RecoveryAction

The order is by predicted stall, cheapest first, and every action is tried once an incident:

1. promote      a hot replica holds the stage's KV up to its last checkpoint          (hot)
2. reconnect    the processes live, only the path between two of them is stuck
3. restart      the same node, or another one that has the slice; its neighbour refills it
4. replan       a new split over the survivors; sessions are replayed
5. fallback     a smaller model or quantization on one node; the answer says so
6. give_up      `SessionLost`, with what was tried

Grades: *exact* gives the same bits as an undisturbed run, at the lost stage's compute speed; *fast* feeds everything in large
chunks, which moves logits (DESIGN 3.2). `auto` is exact while its predicted stall is acceptable.
"""

from __future__ import annotations

from enum import StrEnum

from shardwise.records import Record


class Cause(StrEnum):
    """What was seen."""

    CRASHED = "crashed"  # the process ended
    SILENT = "silent"  # no heartbeat: asleep, stopped, cut off
    STUCK = "stuck"  # heartbeats, but no progress
    CORRUPT = "corrupt"  # the slice is not what the manifest says
    REFUSED = "refused"  # incompatible after a restart


class RecoveryPolicy(Record):
    """What a deployment may do about faults."""

    replicate: str = "none"  # none | standby | hot: what is kept ready for every stage
    recovery: str = "auto"  # exact | fast | auto | off
    max_stall_s: float = 60.0  # auto: beyond this an exact refill is not worth waiting for
    deadline_s: float = 120.0  # after this a session is lost
    checkpoint_tokens: int = 64  # hot: KV goes to the replica every so many tokens
    fallback_model: str = ""  # a MODEL for one node; "" = none


class Incident(Record):
    """A fault under treatment."""

    cause: Cause
    stage: int
    tried: tuple[str, ...] = ()  # "action:node" of this incident, in order
    elapsed_s: float = 0.0


class Available(Record):
    """What there is to recover with."""

    node: str = ""  # where the lost stage ran
    node_alive: bool = True  # that machine answers
    hot_replica: str = ""  # node of a replica with KV
    other_nodes: tuple[str, ...] = ()  # that have the slice and the memory, best first
    replan_layers: tuple[int, ...] = ()  # a feasible split over the survivors
    fallback: bool = False
    refill_s: float = 0.0  # predicted: exact refill of the lost stage
    fast_refill_s: float = 0.0
    restart_s: float = 1.0  # predicted: process start and load


class RecoveryAction(Record):
    """What to do now."""

    kind: str  # promote | reconnect | restart | replan | fallback | give_up
    stage: int
    node: str = ""
    grade: str = "exact"
    layers: tuple[int, ...] = ()
    predicted_stall_s: float = 0.0
    reason: str = ""

    @property
    def name(self) -> str:
        """How `Incident.tried` remembers it."""
        return f"{self.kind}:{self.node}"


def choose_grade(policy: RecoveryPolicy, available: Available) -> str:
    """exact, unless the policy says fast, or auto finds the exact refill too slow."""
    if policy.recovery in ("exact", "fast"):
        return policy.recovery
    too_slow = available.refill_s > policy.max_stall_s and available.fast_refill_s < available.refill_s
    return "fast" if too_slow else "exact"


def next_action(incident: Incident, policy: RecoveryPolicy, available: Available) -> RecoveryAction:
    """The cheapest action that was not tried yet."""
    if policy.recovery == "off":
        return _give_up(incident, "the policy forbids recovery")
    if incident.elapsed_s > policy.deadline_s:
        return _give_up(incident, f"not recovered within {policy.deadline_s:g} s")
    grade = choose_grade(policy, available)
    refill_s = available.refill_s if grade == "exact" else available.fast_refill_s
    for action in _candidates(incident, available, grade, refill_s):
        if action.name not in incident.tried:
            return action
    return _give_up(incident, "nothing is left to try")


def _candidates(incident: Incident, available: Available, grade: str, refill_s: float) -> list[RecoveryAction]:
    stage = incident.stage
    out: list[RecoveryAction] = []
    if available.hot_replica:
        out.append(RecoveryAction(kind="promote", stage=stage, node=available.hot_replica, predicted_stall_s=0.5))
    if incident.cause is Cause.STUCK:
        out.append(RecoveryAction(kind="reconnect", stage=stage, predicted_stall_s=0.2))
    restart_s = available.restart_s + refill_s
    if available.node_alive:
        out.append(RecoveryAction(kind="restart", stage=stage, node=available.node, grade=grade, predicted_stall_s=restart_s))
    out += [
        RecoveryAction(kind="restart", stage=stage, node=node, grade=grade, predicted_stall_s=restart_s)
        for node in available.other_nodes
        if node != available.node
    ]
    if available.replan_layers:
        replay_s = available.restart_s + 2 * refill_s
        out.append(
            RecoveryAction(kind="replan", stage=stage, grade=grade, layers=available.replan_layers, predicted_stall_s=replay_s)
        )
    if available.fallback:
        out.append(RecoveryAction(kind="fallback", stage=stage, grade="fallback", predicted_stall_s=available.restart_s))
    return out


def _give_up(incident: Incident, why: str) -> RecoveryAction:
    tried = ", ".join(incident.tried) or "nothing"
    reason = f"stage {incident.stage} {incident.cause}: {why} (tried: {tried})"
    return RecoveryAction(kind="give_up", stage=incident.stage, reason=reason)
