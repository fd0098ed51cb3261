"""The reconcile loop of a deployment on a cluster: machines that leave are emptied, better plans are shown or carried out.

    members, engine's nodes, cluster file -> cluster.following (when) -> planner (what) -> Deployment.relayout (under load)

**Promises** stages leave a draining node without being asked for; a better plan is shown with its gain and the bytes to move, and
carried out only where the policy says `auto`; no request is lost by either, and a move that fails leaves everything as it was.
A coordinator that does not answer stops nothing. **Fails when** nothing else can hold a leaving node's stages: that is said, and
tried again when the machines change. **Called by** `on_cluster`; one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shardwise.clock import Clock
from shardwise.cluster.engine import NodeInfo
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
from shardwise.cluster.membership import Member
from shardwise.cluster.proposing import propose_instead
from shardwise.cluster.reconcile import Proposal
from shardwise.deploy.options import Placement, RunOptions, main_quantization
from shardwise.errors import NetworkError, ShardwiseError, UsageError
from shardwise.machines.cluster_file import load_cluster
from shardwise.machines.profile import ClusterProfile
from shardwise.model.description import ModelDescription
from shardwise.planner.cost_rates import RuntimeCosts
from shardwise.planner.types import Objective, Plan, PlanRequest, Workload
from shardwise.records import Record, replace

if TYPE_CHECKING:
    from shardwise.deploy.deployment import Deployment

LOOK_EVERY_S = 0.5
EMPTY_AGAIN_S = 10.0  # after a leaving node could not be emptied
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128  # of the request that plans are compared by, where the context allows
SEARCH_S = 5.0


class Members(Protocol):
    """Who is in the cluster; may raise `NetworkError`."""

    def __call__(self) -> tuple[Member, ...]: ...

    def close(self) -> None: ...


class Note(Record):
    """Something to tell people."""

    kind: str  # good | bad | info
    text: str


Measure = Callable[[list[NodeInfo], ClusterProfile], ClusterProfile]  # the nodes, what is known -> with what was missing


class Follower:
    """See the module. `measure` measures machines that the cluster file does not know; without it they are not planned with."""

    def __init__(self, deployment: Deployment, members: Members, policy: FollowPolicy, clock: Clock) -> None:
        self.policy = policy
        self.measure: Measure | None = None
        self.proposal: Proposal | None = None  # the newest one
        self.notes: list[Note] = []
        self.on_note: Callable[[Note], None] = lambda note: None
        self.num_moves = 0
        self._deployment, self._members, self._clock = deployment, members, clock
        self._watch = Watch()
        self._figures = _Figures(policy.cluster_file)
        self._stuck: dict[str, tuple[tuple[str, ...], float]] = {}  # leaving nodes: the others then, when to try again
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """End; a move that is under way ends first, or fails with the deployment."""
        self._stop.set()
        self._thread.join(timeout=10)
        self._members.close()

    def _run(self) -> None:
        said = ""
        while not self._stop.wait(LOOK_EVERY_S):
            try:
                self.look()
            except NetworkError:  # the coordinator is away: nothing is known, nothing is done
                continue
            except ShardwiseError as error:
                if not self._stop.is_set() and error.one_line() != said:
                    said = error.one_line()
                    self._say("bad", said)

    def look(self) -> None:
        """One look at the machines, and what follows from it."""
        members = self._members()
        up = tuple(self._deployment.engine.nodes())
        if not up:
            return
        usable = usable_nodes(up, members, self._watch.nodes)
        for node in leaving_nodes(members):
            self._empty(node, usable)
        if self.policy.cluster_file and not self._deployment.degraded:
            self._watch = noticed(self._watch, usable, self._figures.look(), self._clock.now_s(), self.policy)
            if is_due(self._watch, self._clock.now_s()):
                self._plan(usable)

    def _say(self, kind: str, text: str) -> None:
        note = Note(kind=kind, text=text)
        self.notes.append(note)
        self.on_note(note)

    # -- leaving -------------------------------------------------------------------------------------------------

    def _empty(self, node: str, usable: tuple[str, ...]) -> None:
        """Move everything away from a node that is to leave."""
        others, again_s = self._stuck.get(node, ((), 0.0))
        if not self._deployment.works_on(node) or (others == usable and self._clock.now_s() < again_s):
            return
        self._say("info", f"'{node}' is leaving: its stages move away")
        try:
            self._deployment.drain(node, usable)
        except ShardwiseError as error:
            self._stuck[node] = (usable, self._clock.now_s() + EMPTY_AGAIN_S)
            raise UsageError(f"'{node}' cannot be emptied: {error.one_line()}", where="drain") from error
        self._say("good", f"nothing runs on '{node}' any more")

    # -- planning ------------------------------------------------------------------------------------------------

    def _plan(self, usable: tuple[str, ...]) -> None:
        """Find the best plan for these nodes; show it, or carry it out."""
        deployment, begun_s = self._deployment, self._clock.now_s()
        self._watch = replace(self._watch, due_s=begun_s + self.policy.retry_s)  # if what follows fails
        known = self._known(usable)
        if not known.nodes:
            return
        request = plan_request(deployment.model, deployment.options, known, self.policy)
        running = [(place.node, layers) for place, layers in zip(deployment.layout.places, deployment.manifest.layers)]
        proposal, plan = propose_instead(request, running, stage_costs(deployment.options))
        self.proposal = proposal
        self._watch, wanted = after_planning(self._watch, proposal, self._clock.now_s(), self.policy)
        if wanted:
            self._carry_out(proposal, plan)
        elif proposal.gain_share >= self.policy.least_gain_share:
            self._say("info", proposal.message + ("; it is too soon after the last move" if self.policy.auto else ""))

    def _known(self, usable: tuple[str, ...]) -> ClusterProfile:
        """What the file knows of these nodes, and what is measured now."""
        profile = self._figures.profile
        strangers = sorted(set(usable) - {node.name for node in profile.nodes})
        if strangers and self.measure is not None:
            self._say("info", f"measuring {', '.join(strangers)}")
            infos = [info for info in self._deployment.engine.node_infos() if info.name in usable]
            self._figures.profile = profile = self.measure(infos, profile)
        elif strangers:
            self._say("info", f"{', '.join(strangers)}: not in {self.policy.cluster_file}; 'shardwise probe' measures it")
        return restricted(profile, usable)

    def _carry_out(self, proposal: Proposal, plan: Plan) -> None:
        self._say("info", f"moving: {proposal.message}")
        begun_s, failed = self._clock.now_s(), True
        try:
            layers, places = split_of(plan, self._deployment.engine.node_infos())
            self._deployment.relayout(layers, places)
            self.num_moves += 1
            failed = False
        finally:
            self._watch = moved(self._watch, self._clock.now_s(), self.policy, failed=failed)
        self._say("good", f"moved to {', '.join(plan.nodes)} in {self._clock.now_s() - begun_s:.1f} s")


class _Figures:
    """The cluster file's content; read again when it changes."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._changed_ns = 0
        self.version = 0
        self.profile = load_cluster(path) if path else ClusterProfile(nodes=())

    def look(self) -> int:
        """The version; a file that is being written, or is gone, counts as unchanged."""
        try:
            changed_ns = Path(self._path).stat().st_mtime_ns
        except OSError:
            return self.version
        if changed_ns != self._changed_ns:
            first, self._changed_ns = not self._changed_ns, changed_ns
            if not first:
                self.profile = load_cluster(self._path)
                self.version += 1
        return self.version


def restricted(profile: ClusterProfile, names: tuple[str, ...]) -> ClusterProfile:
    """Only these nodes. Pure."""
    return replace(
        profile,
        nodes=tuple(node for node in profile.nodes if node.name in names),
        links=tuple(link for link in profile.links if link.source in names and link.target in names),
    )


def plan_request(model: ModelDescription, options: RunOptions, cluster: ClusterProfile, policy: FollowPolicy) -> PlanRequest:
    """What a deployment asks the planner: only what it can move to under load. Pure."""
    output = min(OUTPUT_TOKENS, max(1, options.context_tokens // 4))
    workload = Workload(
        prompt_tokens=max(1, min(PROMPT_TOKENS, options.context_tokens - output)),
        output_tokens=output,
        num_users=options.max_sessions,
        context_tokens=options.context_tokens,
        kv_type=options.kv_type,
        prefill_chunk_tokens=options.chunk(main_quantization(model)),
    )
    return PlanRequest(
        model=model,
        cluster=cluster,
        workload=workload,
        objective=Objective(kind=policy.objective),
        strategies=("single_node", "layer_wise"),
        wire_dtypes=(options.wire_dtype,),
        time_limit_s=SEARCH_S,
    )


def stage_costs(options: RunOptions) -> RuntimeCosts:
    """The planner's constants for these options."""
    return replace(RuntimeCosts(), stage_threads=max(1, options.threads))


def split_of(plan: Plan, infos: list[NodeInfo]) -> tuple[tuple[int, ...], list[Placement]]:
    """Layers and place of each stage of a plan. `UsageError` for a node that is not up. Pure."""
    addresses = {info.name: info.address for info in infos}
    gone = [stage.node for stage in plan.stages if stage.node not in addresses]
    if gone:
        raise UsageError(f"not up any more: {', '.join(gone)}", where="plan")
    layers = tuple(end - start for start, end in (stage.layers for stage in plan.stages))
    return layers, [Placement(node=stage.node, host=addresses[stage.node]) for stage in plan.stages]
