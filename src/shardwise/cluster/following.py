"""When a running deployment should think about another plan, and when it may carry one out. Pure.

    the machines that can take work, and when -> Watch, due or not -> (planner) -> Proposal -> carry out, wait, or only show

**Promises** machines that come and go in quick succession are one change; a plan is carried out only with consent, only where
it gains enough, and not too soon after the last move or a failed one: whatever the machines do, moves are at least
`between_moves_s` apart. Time is the caller's. **Called by** the deployment's loop, the simulator.
"""

from __future__ import annotations

import math

from shardwise.cluster.follow_policy import FollowPolicy
from shardwise.cluster.membership import Member, NodeState
from shardwise.cluster.reconcile import Proposal, decide
from shardwise.records import Record, replace


class Watch(Record):
    """What the loop remembers."""

    nodes: tuple[str, ...] = ()  # that can take work, sorted
    figures: int = 0  # version of the measurements
    due_s: float = math.inf  # when to plan next
    not_before_s: float = -math.inf  # no move earlier


def usable_nodes(up: tuple[str, ...], members: tuple[Member, ...], before: tuple[str, ...]) -> tuple[str, ...]:
    """Of the nodes that the engine has, those that may get work; one that is silent for a moment stays what it was.

    A node that is no member of ours (another Ray's) may.
    """
    states = {member.name: member.state for member in members}

    def usable(name: str) -> bool:
        state = states.get(name, NodeState.READY)
        return state is NodeState.READY or (state is NodeState.SUSPECT and name in before)

    return tuple(sorted(name for name in up if usable(name)))


def leaving_nodes(members: tuple[Member, ...]) -> tuple[str, ...]:
    """Nodes from which work has to move away: leaving was the consent."""
    return tuple(member.name for member in members if member.state is NodeState.DRAINING)


def noticed(watch: Watch, nodes: tuple[str, ...], figures: int, now_s: float, policy: FollowPolicy) -> Watch:
    """After a look at the machines."""
    if (nodes, figures) == (watch.nodes, watch.figures):
        return watch
    return replace(watch, nodes=nodes, figures=figures, due_s=now_s + policy.settle_s)


def is_due(watch: Watch, now_s: float) -> bool:
    """Whether to plan now."""
    return bool(watch.nodes) and now_s >= watch.due_s


def after_planning(watch: Watch, proposal: Proposal, now_s: float, policy: FollowPolicy) -> tuple[Watch, bool]:
    """After planning: what to remember, and whether to carry the proposal out now. One that is too early is looked at again."""
    worthwhile = proposal.gain_share >= policy.least_gain_share
    wanted = decide(replace(proposal, worthwhile=worthwhile), consent=False, auto=policy.auto)
    if wanted and now_s < watch.not_before_s:
        return replace(watch, due_s=watch.not_before_s), False
    return replace(watch, due_s=math.inf), wanted


def moved(watch: Watch, now_s: float, policy: FollowPolicy, *, failed: bool) -> Watch:
    """After a move, or one that failed: that one is tried once more, later."""
    if failed:
        return replace(watch, not_before_s=now_s + policy.retry_s, due_s=now_s + policy.retry_s)
    return replace(watch, not_before_s=now_s + policy.between_moves_s)
