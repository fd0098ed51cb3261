"""`launch_local` and `launch`: the workers' processes first, then everything else.

On this machine alone a process for each stage begins to load its code before the model is looked at, and before this process
has loaded what it needs for that; whatever is refused on the way ends them (docs/adr/0045-quick-start.md). So this module
imports little, and the rest only when they have been started.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardwise.clock import SystemClock
from shardwise.cluster.spawn import Ahead
from shardwise.memory import available_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.cluster.engine import ClusterEngine
    from shardwise.deploy.deployment import Deployment
    from shardwise.deploy.options import Placement, RunOptions
    from shardwise.model.description import ModelDescription
    from shardwise.session.peers import Route

MOST_AHEAD = 8  # nobody has looked yet whether the model has that many layers; further workers start when it is their turn
OnProgress = Callable[[str, float], None]  # what is being done, share done (0..1)


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
    free_bytes, began_s = available_bytes(), SystemClock().now_s()
    with _ahead(model, len(layers) or num_stages, elsewhere=bool(settings.get("nodes") or settings.get("follow"))) as ahead:
        from shardwise.deploy.options import RunOptions

        options = RunOptions(num_stages=num_stages, layers=tuple(layers), **settings)
        if options.nodes or options.follow.cluster_file:
            return launch(model, options, on_progress=on_progress)
        from shardwise.deploy.bring_up import Launch, bring_up

        return bring_up(model, Launch(options=options, on_progress=on_progress, free_bytes=free_bytes), ahead, began_s)


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
    free_bytes, began_s = available_bytes(), SystemClock().now_s()
    with _ahead(
        model, len(options.layers) or options.num_stages, elsewhere=engine is not None or placements is not None
    ) as ahead:
        from shardwise.deploy.bring_up import Launch, bring_up

        wanted = Launch(
            options=options,
            engine=engine,
            placements=placements,
            replica_placements=replica_placements,
            driver_host=driver_host,
            route=route,
            on_progress=on_progress,
            free_bytes=free_bytes,
        )
        return bring_up(model, wanted, ahead, began_s)


def num_ahead(num_stages: int) -> int:
    """How many processes to start for a number that nobody has checked yet."""
    return max(0, min(num_stages, MOST_AHEAD))


def _ahead(model: object, num_stages: int, *, elsewhere: bool) -> Ahead:
    """None where the workers run elsewhere, or a download may come first."""
    later = elsewhere or (isinstance(model, str) and model.strip().startswith("hf:"))
    return Ahead(0 if later else num_ahead(num_stages))
