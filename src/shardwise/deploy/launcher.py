"""`launch_local` and `launch`: the workers' interpreters first, then everything else.

On this machine alone a process for each stage begins to load its code before the model is looked at, and before this process
has loaded what it needs for that; whatever is refused on the way ends them (docs/adr/0045-quick-start.md). So this module
imports little.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.clock import SystemClock
from shardwise.cluster.engine import ClusterEngine
from shardwise.cluster.local import LocalEngine
from shardwise.deploy.options import Placement, RunOptions
from shardwise.memory import available_bytes
from shardwise.model.description import ModelDescription
from shardwise.model.resolve import resolve_model

if TYPE_CHECKING:
    from shardwise.deploy.deployment import Deployment
    from shardwise.session.peers import Route

MOST_PREPARED = 8  # nobody has looked yet whether the model has that many layers; further workers start when it is their turn
OnProgress = Callable[[str, float], None]  # what is being done, share done (0..1)


@dataclass(frozen=True, slots=True)
class Launch:
    """What `launch` was asked for, and what it has found and begun."""

    model: Path | ModelDescription
    options: RunOptions
    placements: list[Placement] | None
    replica_placements: list[Placement] | None
    driver_host: str
    route: Route | None
    on_progress: OnProgress | None
    free_bytes: int  # before there was any worker
    prepared_s: float | None  # when processes were started ahead of their configuration; None: none was


def launch_local(
    model: str | Path | ModelDescription,
    *,
    num_stages: int = 1,
    layers: tuple[int, ...] = (),
    on_progress: OnProgress | None = None,
    **settings: Any,
) -> Deployment:
    """Run a model as stage processes on this machine; returns when it is ready.

    `settings` are the fields of `RunOptions` (context_tokens, max_sessions, kv_type, wire_dtype, threads, ...).
    Raises `UsageError`, `ModelError`, `StageOutOfMemory`, `StageLoadFailed`, `StageCrashed`, `ReplyTimeout`.
    """
    options = RunOptions(num_stages=num_stages, layers=tuple(layers), **settings)
    return launch(model, options, on_progress=on_progress)


def launch(
    model: str | Path | ModelDescription,
    options: RunOptions,
    *,
    engine: ClusterEngine | None = None,
    placements: list[Placement] | None = None,
    replica_placements: list[Placement] | None = None,
    driver_host: str = "127.0.0.1",
    route: Route | None = None,
    on_progress: OnProgress | None = None,
) -> Deployment:
    """Run a model on an engine's nodes; `placements` has one entry a stage (default: this machine, or `options.nodes`).

    `route` may put something between stages (`session.peers.Route`).
    """
    if (options.nodes or options.follow.cluster_file) and engine is None:
        from shardwise.deploy.on_cluster import launch_on_cluster  # it needs this module

        return launch_on_cluster(model, options, on_progress=on_progress)
    free_bytes = available_bytes()
    found = model if isinstance(model, ModelDescription) else resolve_model(model)
    with contextlib.ExitStack() as undo:  # ends the processes where it comes to nothing
        prepared_s = None
        if engine is None:
            local = undo.enter_context(contextlib.closing(LocalEngine()))
            engine, prepared_s = local, SystemClock().now_s()
            local.prepare(max(0, min(len(options.layers) or options.num_stages, MOST_PREPARED)))
        from shardwise.deploy.bring_up import bring_up  # only now: its imports take as long as a process's start

        wanted = Launch(
            model=found,
            options=options,
            placements=placements,
            replica_placements=replica_placements,
            driver_host=driver_host,
            route=route,
            on_progress=on_progress,
            free_bytes=free_bytes,
            prepared_s=prepared_s,
        )
        deployment = bring_up(wanted, engine)
        undo.pop_all()
    return deployment
