"""Run a model on the machines of the cluster that this one belongs to.

The cluster's state folder and a plan's nodes flow in; a `Deployment` over `RayEngine` comes out. **Promises** each stage
runs on the node that the plan names, the driver listens on this machine's address in the cluster, and the engine ends
with the deployment. **Fails with** `UsageError` (no cluster, a node that is not up), and as `launch` says.
**Called by** `cli`, `server`, people who embed shardwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from shardwise.cluster.engine import NodeInfo
from shardwise.cluster.lifecycle import attach, own_node
from shardwise.cluster.state import StateDir
from shardwise.deploy.deployment import Deployment
from shardwise.deploy.launcher import OnProgress, launch
from shardwise.deploy.memory import stage_bytes
from shardwise.deploy.options import Placement, RunOptions
from shardwise.errors import StageOutOfMemory, UsageError
from shardwise.model.description import ModelDescription
from shardwise.model.resolve import describe_model, resolve_model

IN_TURN = "*"


def launch_on_cluster(
    model: str | Path | ModelDescription,
    options: RunOptions,
    *,
    state: StateDir | None = None,
    on_progress: OnProgress | None = None,
) -> Deployment:
    """Launch on the nodes of `options.nodes`: one name a stage, or this node first and then the others in turn.

    After a re-split into another number of stages the named nodes are used in turn.
    """
    folder = state or StateDir()
    description = model if isinstance(model, ModelDescription) else describe_model(resolve_model(model))
    options = options.settled_for(description)
    options.check(description)
    engine = attach(folder)
    try:
        infos = engine.node_infos()
        own = own_node(folder, infos)
        placements = place_stages(infos, own, len(options.layer_counts(description)), options.nodes)
        require_node_memory(description, options, placements, infos)
    except BaseException:
        engine.close()
        raise
    return launch(description, options, engine=engine, placements=placements, driver_host=own.address, on_progress=on_progress)


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
