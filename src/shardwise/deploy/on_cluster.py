"""Run a model on the machines of the cluster that this one belongs to.

The cluster's state folder and a plan's nodes flow in; a `Deployment` over `RayEngine` comes out. **Promises** each stage
runs on the node that the plan names, the driver listens on this machine's address in the cluster, the engine ends
with the deployment, and a `Follower` reacts to machines that come and go. **Fails with** `UsageError` (no cluster, a node that
is not up), `NoFeasiblePlanError` (nothing was named and nothing fits), and as `launch` says.
**Called by** `cli`, `server`, people who embed shardwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from shardwise.clock import SystemClock
from shardwise.cluster.control import ListRequest, NodeList
from shardwise.cluster.control_link import ControlClient
from shardwise.cluster.engine import NodeInfo
from shardwise.cluster.following import usable_nodes
from shardwise.cluster.lifecycle import attach, own_node
from shardwise.cluster.membership import Member
from shardwise.cluster.state import StateDir
from shardwise.deploy.deployment import Deployment
from shardwise.deploy.following import Follower, plan_request, restricted, stage_costs
from shardwise.deploy.launcher import OnProgress, launch
from shardwise.deploy.memory import stage_bytes
from shardwise.deploy.options import Placement, RunOptions
from shardwise.errors import NetworkError, ProtocolMismatch, StageOutOfMemory, UsageError
from shardwise.machines.cluster_file import load_cluster
from shardwise.model.description import ModelDescription
from shardwise.model.resolve import describe_model, resolve_model
from shardwise.planner.find_plan import find_plan
from shardwise.records import replace
from shardwise.transport.security import NodeKeys

IN_TURN = "*"
ASK_TIMEOUT_S = 3.0


def launch_on_cluster(
    model: str | Path | ModelDescription,
    options: RunOptions,
    *,
    state: StateDir | None = None,
    on_progress: OnProgress | None = None,
) -> Deployment:
    """Launch on the nodes of `options.nodes`: one name a stage, or this node first and then the others in turn.

    Without nodes or a split, the best plan for the nodes that are up, by the measurements of `options.follow.cluster_file`.
    After a re-split into another number of stages the named nodes are used in turn.
    """
    folder = state or StateDir()
    description = model if isinstance(model, ModelDescription) else describe_model(resolve_model(model))
    options = options.settled_for(description)
    options.check(description)
    engine = attach(folder)
    members = ClusterMembers(folder)
    try:
        infos = engine.node_infos()
        own = own_node(folder, infos)
        if not options.nodes and not options.layers and options.num_stages == 1:
            options = planned(description, options, usable_nodes(tuple(i.name for i in infos), members(), ()))
        placements = place_stages(infos, own, len(options.layer_counts(description)), options.nodes)
        require_node_memory(description, options, placements, infos)
    except BaseException:
        members.close()
        engine.close()
        raise
    try:
        deployment = launch(
            description, options, engine=engine, placements=placements, driver_host=own.address, on_progress=on_progress
        )
    except BaseException:
        members.close()
        raise
    deployment.follower = Follower(deployment, members, options.follow, SystemClock())
    deployment.follower.start()
    return deployment


class ClusterMembers:
    """Asks the coordinator over one connection; one thread at a time."""

    def __init__(self, state: StateDir) -> None:
        self._state = state
        self._client: ControlClient | None = None

    def __call__(self) -> tuple[Member, ...]:
        """Who is there. `NetworkError` where the coordinator does not answer; it is looked for anew at the next call."""
        if self._client is None:
            cluster = self._state.load_cluster()
            self._client = ControlClient(
                cluster.coordinator_addresses, NodeKeys.load(self._state.node_key), cluster.coordinator_public
            )
        try:
            reply = self._client.ask(ListRequest(), timeout_s=ASK_TIMEOUT_S)
        except NetworkError:
            self.close()
            raise
        if not isinstance(reply, NodeList):
            raise ProtocolMismatch(f"{type(reply).__name__} is no list of nodes", where="coordinator")
        return tuple(shown.member for shown in reply.nodes)

    def close(self) -> None:
        """May be called twice."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


def planned(model: ModelDescription, options: RunOptions, usable: tuple[str, ...]) -> RunOptions:
    """The options with layers and nodes of the best plan for these nodes. `NoFeasiblePlanError` where nothing fits."""
    path = options.follow.cluster_file
    cluster = restricted(load_cluster(path), usable)
    if not cluster.nodes:
        raise UsageError(f"none of its nodes is up; up: {', '.join(usable)}", where=path, hint="measure with 'shardwise probe'")
    plan = find_plan(plan_request(model, options, cluster, options.follow), stage_costs(options))
    layers = tuple(end - start for start, end in (stage.layers for stage in plan.stages))
    return replace(options, layers=layers, num_stages=len(layers), nodes=tuple(stage.node for stage in plan.stages))


def place_stages(infos: Sequence[NodeInfo], own: NodeInfo, num_stages: int, nodes: Sequence[str] = ()) -> list[Placement]:
    """One placement a stage, nodes in turn. Raises `UsageError` for a node that is not up. Pure."""
    known = {info.name: info for info in infos}
    named = [name for name in nodes if name != IN_TURN]
    missing = [name for name in named if name not in known]
    if missing:
        raise UsageError(
            f"not up in the cluster: {', '.join(missing)}", where="nodes", hint=f"nodes that are: {', '.join(known)}"
        )
    in_turn = named or [own.name, *(name for name in known if name != own.name)]
    chosen = [in_turn[index % len(in_turn)] for index in range(num_stages)]
    return [Placement(node=name, host=known[name].address) for name in chosen]


def require_node_memory(
    model: ModelDescription, options: RunOptions, placements: Sequence[Placement], infos: Sequence[NodeInfo]
) -> None:
    """`StageOutOfMemory` for a node whose stages do not fit what a model may use there. Pure."""
    available = {info.name: info.memory_bytes for info in infos}
    needed: dict[str, int] = dict.fromkeys(available, 0)
    start = 0
    for count, place in zip(options.layer_counts(model), placements, strict=True):
        needed[place.node] += stage_bytes(model, start, start + count, options)
        start += count
    for name, num_bytes in needed.items():
        if num_bytes > available[name]:
            raise StageOutOfMemory(
                f"the stages on '{name}' need {num_bytes} bytes, {available[name]} may be used",
                where=name,
                hint="give it fewer layers, lower --ctx or --sessions, or plan with 'shardwise plan'",
                needed_bytes=num_bytes,
                available_bytes=available[name],
            )


def plan_nodes(plan: Path) -> tuple[str, ...]:
    """The node of each stage from a file made by `plan --json`."""
    try:
        document = msgspec.json.decode(plan.read_bytes())
        return tuple(str(stage["ranks"][0]["node"]) for stage in document["stages"])
    except (OSError, msgspec.DecodeError, LookupError, TypeError) as error:
        raise UsageError(f"cannot read the plan: {error}", where=str(plan), hint="made by 'shardwise plan --json'") from error
