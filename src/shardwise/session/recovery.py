"""What to do about a fault, as a pure function: data in, one action out. No clock, socket or process here.

    incident (what happened, to which stage, what was tried) + policy + what is available -> RecoveryAction

The order is by predicted stall, cheapest first, and every action is tried once an incident:

1. promote      a replica stands by: a hot one holds the stage's KV, a standby one is refilled
2. reconnect    the processes live, only the path between two of them is stuck
3. restart      the same node, or another one that has the slice; it gets its KV checkpoints, its neighbour refills the rest
   recut        the same after the slice was found to be damaged: it is cut from the model again first
4. replan       a new split over the survivors; sessions are replayed
5. fallback     a smaller model or quantization on one node; the answer says so
6. give_up      `SessionLost`, with what was tried

Grades: *exact* gives the same bits as an undisturbed run, at the lost stage's compute speed; *fast* feeds everything in large
chunks, which moves logits (ADR 0080). `auto` is exact while its predicted stall is acceptable.
"""

from __future__ import annotations

from enum import StrEnum

from shardwise.records import Record


class Cause(StrEnum):
    """What was seen."""

    CRASHED = "crashed"  # the process ended
    SILENT = "silent"  # no heartbeat: asleep, cut off
    STOPPED = "stopped"  # its own operating system says that it is stopped
    STUCK = "stuck"  # heartbeats, but no progress
    CORRUPT = "corrupt"  # the slice is not what the manifest says
    REFUSED = "refused"  # incompatible after a restart


# Seconds until a fault is seen, and until connections are made anew: parts of every predicted stall.
DETECTION_S = {
    Cause.CRASHED: 0.2,
    Cause.SILENT: 1.7,
    Cause.STOPPED: 1.7,
    Cause.STUCK: 6.0,
    Cause.CORRUPT: 0.2,
    Cause.REFUSED: 0.2,
}
RECONNECTION_S = 0.2


class RecoveryPolicy(Record):
    """What a deployment may do about faults."""

    replicate: str = "none"  # none | standby | hot: what is kept ready for every stage
    recovery: str = "auto"  # exact | fast | auto | off
    max_stall_s: float = 60.0  # auto: beyond this an exact refill is not worth waiting for
    deadline_s: float = 120.0  # after this a session is lost
    rebalance: bool = False  # layers move away from a stage that has become slow
    fallback_model: str = ""  # a MODEL for one node; "" = none


class Incident(Record):
    """A fault under treatment."""

    cause: Cause
    stage: int
    tried: tuple[str, ...] = ()  # "action:node" of this incident, in order
    elapsed_s: float = 0.0
    silent_s: float = 0.0  # since its last sign of life when it was given up; 0 = not known, the usual time counts


class Available(Record):
    """What there is to recover with."""

    node: str = ""  # where the lost stage ran
    node_alive: bool = True  # that machine answers
    hot_replica: str = ""  # node of a replica that stands by
    replica_holds_kv: bool = True  # hot: it has computed everything; False (standby): it is refilled first
    other_nodes: tuple[str, ...] = ()  # that have the slice and the memory, best first
    replan_layers: tuple[int, ...] = ()  # a feasible split over the survivors
    fallback: bool = False
    refill_s: float = 0.0  # predicted: exact refill of the lost stage
    replay_s: float = 0.0  # predicted: exact replay through all stages of a new split
    fast_refill_s: float = 0.0
    checkpoint_refill_s: float | None = None  # predicted: of what came after the checkpoints, where every session has one
    restart_s: float = 1.0  # predicted: process start and load


class RecoveryAction(Record):
    """What to do now."""

    kind: str  # promote | reconnect | restart | recut | replan | fallback | give_up
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
    refill_s = exact_refill_s(available)
    too_slow = refill_s > policy.max_stall_s and available.fast_refill_s < refill_s
    return "fast" if too_slow else "exact"


def exact_refill_s(available: Available) -> float:
    """Of the lost stage: from checkpoints, where there are some, else row by row."""
    return available.refill_s if available.checkpoint_refill_s is None else min(available.refill_s, available.checkpoint_refill_s)


def next_action(incident: Incident, policy: RecoveryPolicy, available: Available) -> RecoveryAction:
    """The cheapest action that was not tried yet."""
    if policy.recovery == "off":
        return _give_up(incident, "the policy forbids recovery")
    if incident.elapsed_s > policy.deadline_s:
        return _give_up(incident, f"not recovered within {policy.deadline_s:g} s")
    for action in _candidates(incident, available, choose_grade(policy, available)):
        if action.name not in incident.tried:
            return action
    return _give_up(incident, "nothing is left to try")


def _candidates(incident: Incident, available: Available, grade: str) -> list[RecoveryAction]:
    stage = incident.stage
    seen_s = (incident.silent_s or DETECTION_S[incident.cause]) + RECONNECTION_S
    refill_s = exact_refill_s(available) if grade == "exact" else available.fast_refill_s
    out: list[RecoveryAction] = []

    def add(kind: str, stall_s: float, *, node: str = "", grade: str = "exact", layers: tuple[int, ...] = ()) -> None:
        out.append(
            RecoveryAction(kind=kind, stage=stage, node=node, grade=grade, layers=layers, predicted_stall_s=seen_s + stall_s)
        )

    if available.hot_replica and available.replica_holds_kv:
        add("promote", 0.0, node=available.hot_replica)
    elif available.hot_replica:
        add("promote", refill_s, node=available.hot_replica, grade=grade)
    if incident.cause is Cause.STUCK:
        add("reconnect", 0.0)
    if incident.cause is Cause.CORRUPT:  # the files are made (or fetched) again first
        add("recut", available.restart_s + refill_s, node=available.node, grade=grade)
    elif available.node_alive:
        add("restart", available.restart_s + refill_s, node=available.node, grade=grade)
    for node in available.other_nodes:
        if node != available.node:
            add("restart", available.restart_s + refill_s, node=node, grade=grade)
    if available.replan_layers:
        replay_s = available.replay_s if grade == "exact" else available.fast_refill_s
        add("replan", available.restart_s + replay_s, grade=grade, layers=available.replan_layers)
    if available.fallback:
        add("fallback", available.restart_s + available.fast_refill_s, grade="fallback")
    return out


def _give_up(incident: Incident, why: str) -> RecoveryAction:
    tried = ", ".join(incident.tried) or "nothing"
    reason = f"stage {incident.stage} {incident.cause}: {why} (tried: {tried})"
    return RecoveryAction(kind="give_up", stage=incident.stage, reason=reason)
