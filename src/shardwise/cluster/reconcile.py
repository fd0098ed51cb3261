"""What to do so that the machines run what was decided; and whether another decision would be better. Pure.

    desired workers + observed nodes and workers -> actions            (`next_actions`)
    running plan + better plan + who holds what  -> proposal           (`propose`)
    proposal + consent                           -> carry out or ask   (`decide`)

**Promises** nothing that serves is moved or stopped without consent, unless it cannot serve where it is; each action is
safe to repeat; equal input gives equal output. No clock, socket or port in here. **Called by** `proposing` and
`following` (`propose`, `decide`). `next_actions` is called by its tests only: a running deployment is put right by its
supervisor (`session.recovery` decides), and the simulator, which needs it, is to come.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.cluster.engine import WorkerStatus
from shardwise.cluster.follow_policy import WORTH_SHARE
from shardwise.cluster.membership import Member, NodeState
from shardwise.model.description import ModelDescription
from shardwise.planner.types import Plan
from shardwise.records import Record
from shardwise.units import format_bytes, format_duration

MAY_START = frozenset({NodeState.READY})
MAY_STAY = frozenset({NodeState.READY, NodeState.SUSPECT, NodeState.DRAINING})


class DesiredWorker(Record):
    """A worker that shall run, where, and what it must hold."""

    name: str
    node: str
    layers: tuple[int, int]  # [start, end)
    weight_bytes: int


class Desired(Record):
    """All of a deployment's workers."""

    workers: tuple[DesiredWorker, ...]


class Observed(Record):
    """What is there."""

    members: tuple[Member, ...]
    workers: tuple[WorkerStatus, ...]

    def state(self, node: str) -> NodeState:
        """The state of a node by name; a node that nobody knows is gone."""
        return next((m.state for m in self.members if m.name == node), NodeState.GONE)


class Action(Record, tag_field="action"):
    """Base of all actions; `why` is for people."""

    why: str


class StartWorker(Action, tag="start"):
    worker: DesiredWorker


class StopWorker(Action, tag="stop"):
    name: str


class MoveWorker(Action, tag="move"):
    """Start on `worker.node`, then stop on `source`."""

    worker: DesiredWorker
    source: str


class NeedPlan(Action, tag="plan"):
    """These workers have no node to run on: plan anew."""

    workers: tuple[str, ...]


class AskConsent(Action, tag="ask"):
    """Something would be better that nobody has agreed to."""

    moves: tuple[DesiredWorker, ...]
    total_bytes: int


AnyAction = StartWorker | StopWorker | MoveWorker | NeedPlan | AskConsent


def desired_of(plan: Plan) -> Desired:
    """The workers of a plan's stages, named as `deploy` names them."""
    return Desired(
        workers=tuple(
            DesiredWorker(name=f"stage-{i}", node=stage.node, layers=stage.layers, weight_bytes=stage.ranks[0].weight_bytes)
            for i, stage in enumerate(plan.stages)
        )
    )


def next_actions(desired: Desired, observed: Observed, *, consent: bool) -> tuple[AnyAction, ...]:
    """What to do now, most urgent first."""
    running = {w.name: w for w in observed.workers if w.alive}
    wanted = {w.name: w for w in desired.workers}
    starts: list[AnyAction] = []
    moves: list[MoveWorker] = []
    homeless: list[str] = []
    for worker in desired.workers:
        now = running.get(worker.name)
        if now is not None and now.node == worker.node:
            continue
        if observed.state(worker.node) not in MAY_START:
            if now is None or observed.state(now.node) not in MAY_STAY:
                homeless.append(worker.name)
        elif now is None:
            starts.append(StartWorker(worker=worker, why=_why_missing(worker.name, observed.workers)))
        else:
            moves.append(MoveWorker(worker=worker, source=now.node, why=f"the plan has it on '{worker.node}'"))
    stops = [StopWorker(name=name, why="the plan does not have it") for name in running if name not in wanted]
    out: list[AnyAction] = []
    if homeless:
        nodes = ", ".join(sorted({f"'{wanted[n].node}' is {observed.state(wanted[n].node)}" for n in homeless}))
        out.append(NeedPlan(workers=tuple(homeless), why=nodes))
    return (*out, *starts, *_with_consent(moves, observed, consent), *(stops if consent or not moves else ()))


def _with_consent(moves: list[MoveWorker], observed: Observed, consent: bool) -> list[AnyAction]:
    """Moves away from a node that is leaving need no consent: leaving was the consent."""
    forced = [m for m in moves if consent or observed.state(m.source) not in (NodeState.READY, NodeState.SUSPECT)]
    open_moves = [m for m in moves if m not in forced]
    out: list[AnyAction] = list(forced)
    if open_moves:
        workers = tuple(m.worker for m in open_moves)
        total = sum(w.weight_bytes for w in workers)
        out.append(AskConsent(moves=workers, total_bytes=total, why=f"{len(workers)} stages would move, {format_bytes(total)}"))
    return out


def _why_missing(name: str, workers: Iterable[WorkerStatus]) -> str:
    for status in workers:
        if status.name == name:
            return f"it ended with status {status.exit_status}" if status.exit_status is not None else "its node is gone"
    return "it does not run"


# -- a better plan ---------------------------------------------------------------------------------------------------


class Transfer(Record):
    """Layers that a node would have to get."""

    node: str
    layers: tuple[tuple[int, int], ...]  # ranges [start, end)
    num_bytes: int


class Proposal(Record):
    """Another plan, what it would bring and what it would cost."""

    worthwhile: bool
    gain_share: float  # of the objective: 0.25 = a quarter less time
    decode_tokens_per_s: tuple[float, float]  # now, then
    time_to_first_token_s: tuple[float, float]
    nodes_added: tuple[str, ...]
    nodes_dropped: tuple[str, ...]
    transfers: tuple[Transfer, ...]
    total_bytes: int
    message: str


def propose(model: ModelDescription, current: Plan, better: Plan, *, held: dict[str, set[int]] | None = None) -> Proposal:
    """Compare two plans for one model. `held`: layers that nodes have beyond those of the current plan (their stores)."""
    have = {node: set(layers) for node, layers in (held or {}).items()}
    for node, layers in _layers_by_node(current).items():
        have.setdefault(node, set()).update(layers)
    transfers = tuple(
        Transfer(node=node, layers=_ranges(missing), num_bytes=sum(model.layers[i].weight_bytes for i in missing))
        for node, layers in _layers_by_node(better).items()
        if (missing := sorted(layers - have.get(node, set())))
    )
    total = sum(t.num_bytes for t in transfers)
    gain = 1 - better.objective_value / current.objective_value if current.objective_value > 0 else 0.0
    now, then = current.predicted, better.predicted
    rates = (now.decode_tokens_per_s if now else 0.0, then.decode_tokens_per_s if then else 0.0)
    first = (now.time_to_first_token_s if now else 0.0, then.time_to_first_token_s if then else 0.0)
    added = tuple(n for n in better.nodes if n not in current.nodes)
    dropped = tuple(n for n in current.nodes if n not in better.nodes)
    worthwhile = gain >= WORTH_SHARE
    return Proposal(
        worthwhile=worthwhile,
        gain_share=gain,
        decode_tokens_per_s=rates,
        time_to_first_token_s=first,
        nodes_added=added,
        nodes_dropped=dropped,
        transfers=transfers,
        total_bytes=total,
        message=_message(worthwhile, gain, rates, first, added, total),
    )


def decide(proposal: Proposal, *, consent: bool, auto: bool) -> bool:
    """Whether to carry a proposal out now."""
    return consent or (auto and proposal.worthwhile)


def _message(
    worthwhile: bool, gain: float, rates: tuple[float, float], first: tuple[float, float], added: tuple[str, ...], total: int
) -> str:
    if not worthwhile:
        return f"no other plan is better by {WORTH_SHARE:.0%}; leave it as it is"
    with_nodes = f" with {', '.join(added)}" if added else ""
    return (
        f"another plan{with_nodes} would take {gain:.0%} less time: {rates[0]:.1f} -> {rates[1]:.1f} tokens/s, first token "
        f"{format_duration(first[0])} -> {format_duration(first[1])}; it moves {format_bytes(total)}"
    )


def _layers_by_node(plan: Plan) -> dict[str, set[int]]:
    out: dict[str, set[int]] = {}
    for stages in (*plan.pipelines, plan.prefill_stages):
        for stage in stages:
            for rank in stage.ranks:
                out.setdefault(rank.node, set()).update(range(*stage.layers))
    return out


def _ranges(layers: list[int]) -> tuple[tuple[int, int], ...]:
    """[3, 4, 5, 9] -> ((3, 6), (9, 10))."""
    out: list[tuple[int, int]] = []
    for layer in layers:
        if out and out[-1][1] == layer:
            out[-1] = (out[-1][0], layer + 1)
        else:
            out.append((layer, layer + 1))
    return tuple(out)
