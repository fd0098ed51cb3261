"""plan -> verified slices -> running stages -> ready: where the rooms are joined.

describe -> prepare_slices -> WorkerSpec a stage -> engine.start -> Ready from all -> Connect -> Connected from all

**Fails with** what `launch` names; then nothing is left running that was started here. **Called by** `launcher`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from shardwise.cluster.engine import ClusterEngine
from shardwise.cluster.local import LocalEngine
from shardwise.cluster.spawn import Ahead
from shardwise.deploy.deployment import Deployment
from shardwise.deploy.fallback import require_fallback
from shardwise.deploy.launcher import OnProgress, num_ahead
from shardwise.deploy.memory import require_memory
from shardwise.deploy.options import Placement, RunOptions
from shardwise.deploy.slices import prepare_slices
from shardwise.deploy.tokenizer import LlamaTokenizer
from shardwise.deploy.workers import Layout, crash_error, hello_of, listen_on, make_layout
from shardwise.errors import ReplyTimeout
from shardwise.model.description import ModelDescription
from shardwise.model.resolve import describe_model, resolve_model
from shardwise.session.driver import Driver
from shardwise.session.journal import Journal
from shardwise.session.peers import DriverSettings, Route
from shardwise.shards.manifest import Manifest
from shardwise.transport.promptness import prompt_context
from shardwise.transport.security.keys import NodeKeys

MOST_HEAD_START_S = 0.3  # what of its start a worker can have behind it when it is given its configuration: its code is loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What `launch` was asked for."""

    options: RunOptions
    engine: ClusterEngine | None = None  # None: this machine alone
    placements: list[Placement] | None = None
    replica_placements: list[Placement] | None = None
    driver_host: str = "127.0.0.1"
    route: Route | None = None
    on_progress: OnProgress | None = None
    free_bytes: int  # before there was any worker


def bring_up(model: str | Path | ModelDescription, wanted: Launch, ahead: Ahead, began_s: float) -> Deployment:
    """Until it is ready. `ahead`: processes that have begun, at `began_s`, to load a worker's code."""
    if wanted.engine is not None:
        return _bring_up(_found(model), wanted, wanted.engine, None)
    with contextlib.ExitStack() as undo:
        local = undo.enter_context(contextlib.closing(LocalEngine()))
        local.adopt(ahead.take())
        found = _found(model)
        if wanted.placements is None:  # after a download there is none yet
            local.prepare(num_ahead(len(wanted.options.layers) or wanted.options.num_stages))
        deployment = _bring_up(found, wanted, local, began_s)
        undo.pop_all()
    local.prepare(0)  # none waits where each stage took one
    return deployment


def _found(model: str | Path | ModelDescription) -> Path | ModelDescription:
    return model if isinstance(model, ModelDescription) else resolve_model(model)


def _bring_up(model: Path | ModelDescription, wanted: Launch, engine: ClusterEngine, prepared_s: float | None) -> Deployment:
    """The engine belongs to the deployment from the first worker on."""
    say = wanted.on_progress or (lambda what, share: None)
    description = describe_model(model)
    options = wanted.options.settled_for(description)
    options.check(description)
    fallback = require_fallback(description, options)
    if wanted.placements is None:  # with placements, whoever made them has looked at each node's memory
        require_memory(description, options, wanted.free_bytes)
    manifest, files = prepare_slices(description, options, lambda done, total: say("slicing", done / max(total, 1)))
    places = wanted.placements or [Placement() for _ in files]
    tokenizer = LlamaTokenizer(description.source.paths[0], description.tokenizer.chat_template)
    keys = NodeKeys.generate() if options.encrypt else None
    host = wanted.driver_host
    with contextlib.ExitStack() as undo:  # of what a failure here would leave behind
        context = prompt_context()
        undo.callback(context.destroy, linger=0)
        journal = undo.enter_context(Journal(Path(options.journal_dir))) if options.journal_dir else None
        driver = Driver(_driver_settings(options, manifest, host, wanted.route), tokenizer, keys, context, journal=journal)
        given_s = driver.clock.now_s()
        layout = make_layout(description, options, manifest, places, driver.peers, host, keys, context)
        deployment = Deployment(
            layout=layout,
            tokenizer=tokenizer,
            engine=_started(engine, layout),
            driver=driver,
            context=context,
            keys=keys,
            driver_host=host,
            fallback=fallback,
            replica_places=wanted.replica_placements,
        )
        undo.pop_all()
    try:
        deployment.replicate(at_launch=True)
        driver.start()
        tokenizer.load()  # while the workers load
        _wait_ready(deployment, options.start_timeout_s, say)
        head_start_s = 0.0 if prepared_s is None else min(given_s - prepared_s, MOST_HEAD_START_S)
        deployment.start_s = driver.clock.now_s() - given_s + head_start_s
        deployment.supervise(options.recovery)
    except BaseException:
        deployment.close()
        raise
    return deployment


def _wait_ready(deployment: Deployment, timeout_s: float, say: OnProgress) -> None:
    """Until every stage has loaded and knows its neighbours; a worker that ends meanwhile is an error at once."""
    driver, num_stages = deployment.driver, deployment.driver.num_stages
    end_s = driver.clock.now_s() + timeout_s
    told, moved_bytes = -1, 0
    while not driver.connected:
        if (moved := _moved_bytes(driver, say)) != moved_bytes:  # slices are on their way: the time begins anew
            moved_bytes, end_s = moved, driver.clock.now_s() + timeout_s
        if driver.clock.now_s() > end_s:
            raise ReplyTimeout(f"the stages were not ready within {timeout_s:.0f} s", hint="raise --start-timeout")
        if len(driver.peers.ready) != told:
            told = len(driver.peers.ready)
            say("loading", told / num_stages)
        driver.wait_changed(0.1)
        for status in deployment.engine.statuses():
            if not status.alive and driver.failure is None:
                driver.wait_changed(0.3)  # its own last word says more
                raise driver.failure or crash_error(status.name, status.exit_status, status.log_tail)
        if driver.failure is not None:
            raise driver.failure


def _moved_bytes(driver: Driver, say: OnProgress) -> int:
    """What the workers have fetched and verified so far, all together; says how far the slowest one is."""
    preparing = [p for stage, p in driver.preparing.items() if stage not in driver.peers.ready]
    if preparing:
        last = max(preparing, key=lambda p: p.left_s or 0.0)
        say(f"{last.what} stage {last.stage}", last.done_bytes / max(last.total_bytes, 1))
    return sum(p.done_bytes for p in preparing)


def _driver_settings(options: RunOptions, manifest: Manifest, driver_host: str, route: Route | None) -> DriverSettings:
    return DriverSettings(
        num_stages=len(manifest.layers),
        max_sessions=options.max_sessions,
        context_tokens=options.context_tokens,
        hello=hello_of(manifest, options),
        listen=listen_on(driver_host),
        advertise_host=driver_host,
        max_queue=options.max_queue,
        probe_interval_s=options.probe_interval_s,
        route=route,
        checkpoints=options.checkpoints,
    )


def _started(engine: ClusterEngine, layout: Layout) -> ClusterEngine:
    """Start all workers, at once; the last one, which loads the vocabulary too, has most to do and begins."""
    try:
        for stage in reversed(range(len(layout.names))):
            engine.start(layout.spec(stage, 1))
    except BaseException:
        engine.close()
        raise
    return engine
