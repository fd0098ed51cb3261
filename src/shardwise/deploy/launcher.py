"""plan -> verified slices -> running stages -> ready: the only place that joins the rooms.

describe -> prepare_slices -> WorkerSpec a stage -> engine.start -> Ready from all -> Connect -> Connected from all
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from shardwise.cluster.engine import ClusterEngine
from shardwise.cluster.local import LocalEngine
from shardwise.deploy.deployment import Deployment, crash_error, worker_name, worker_spec
from shardwise.deploy.memory import require_memory
from shardwise.deploy.options import Placement, RunOptions, main_quantization
from shardwise.deploy.slices import prepare_slices, servable_pieces, slice_orders
from shardwise.deploy.tokenizer import LlamaTokenizer
from shardwise.errors import ReplyTimeout
from shardwise.model.description import ModelDescription
from shardwise.model.resolve import describe_model, resolve_model
from shardwise.records import replace
from shardwise.session.driver import Driver
from shardwise.session.journal import Journal
from shardwise.session.peers import DriverSettings
from shardwise.shards.manifest import Manifest
from shardwise.stage.backend import BackendSettings
from shardwise.stage.config import AllowedPeer, WorkerConfig
from shardwise.stage.llama.library import build_identity
from shardwise.stage.own_slice import PieceAddress, SliceOrder
from shardwise.transport.handshake import REPLICA_STAGE, Hello
from shardwise.transport.pieces import PieceServer
from shardwise.transport.security.keys import NodeKeys

LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
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
    on_progress: OnProgress | None = None,
) -> Deployment:
    """Run a model on an engine's nodes; `placements` has one entry a stage (default: this machine, or `options.nodes`)."""
    if options.nodes and engine is None:
        from shardwise.deploy.on_cluster import launch_on_cluster  # it needs this module

        return launch_on_cluster(model, options, on_progress=on_progress)
    say = on_progress or (lambda what, share: None)
    description = model if isinstance(model, ModelDescription) else describe_model(resolve_model(model))
    options.check(description)
    if placements is None:  # with placements, whoever made them has looked at each node's memory
        require_memory(description, options)
    manifest, files = prepare_slices(description, options, lambda done, total: say("slicing", done / max(total, 1)))
    places = placements or [Placement() for _ in files]
    tokenizer = LlamaTokenizer(description.source.paths[0], description.tokenizer.chat_template)
    hello = _hello(manifest, options)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys = NodeKeys.generate() if options.encrypt else None
    settings = DriverSettings(
        num_stages=len(files),
        max_sessions=options.max_sessions,
        context_tokens=options.context_tokens,
        hello=hello,
        listen=_listen(driver_host),
        advertise_host=driver_host,
        max_queue=options.max_queue,
        probe_interval_s=options.probe_interval_s,
    )
    journal = Journal(Path(options.journal_dir)) if options.journal_dir else None
    driver = Driver(settings, tokenizer, keys, context, journal=journal)
    chosen_engine = engine or LocalEngine()
    pieces = _serve_pieces(description, manifest, options, places, driver, driver_host, keys, context)
    peers = (PieceAddress(address=pieces.address, public_key=keys.public),) if pieces is not None and keys is not None else ()
    orders = slice_orders(description, manifest, options, peers)
    configs = _worker_configs(description, options, orders, places, driver, keys)
    deployment = Deployment(
        model=description,
        manifest=manifest,
        options=options,
        tokenizer=tokenizer,
        engine=_started(chosen_engine, configs, places),
        driver=driver,
        configs=configs,
        places=places,
        context=context,
        pieces=pieces,
    )
    try:
        if options.recovery.replicate != "none":
            replicas = [_replica_config(config) for config in configs]
            deployment.add_replicas(replicas, replica_placements or places, hot=options.recovery.replicate == "hot")
        driver.start()
        _wait_ready(deployment, options.start_timeout_s, say)
        deployment.supervise(options.recovery)
    except BaseException:
        deployment.close()
        raise
    return deployment


def _serve_pieces(
    model: ModelDescription,
    manifest: Manifest,
    options: RunOptions,
    places: list[Placement],
    driver: Driver,
    host: str,
    keys: NodeKeys | None,
    context: zmq.Context[zmq.Socket[bytes]],
) -> PieceServer | None:
    """Where stages run on other machines: hand out what they lack, to this deployment's workers only."""
    if keys is None or all(place.host in LOCAL_HOSTS for place in places):
        return None
    source = servable_pieces(model, manifest, options)
    return PieceServer(context, _listen(host), lambda: source, keys=keys, allowed=driver.peers.allowed)


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


def _listen(host: str) -> str:
    return f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"


def _hello(manifest: Manifest, options: RunOptions) -> Hello:
    return Hello(
        deployment=manifest.model,
        epoch=1,
        manifest_digest=manifest.digest,
        revision_digest=manifest.revision_digest,
        tokenizer_digest=manifest.tokenizer_digest,
        quantization_digest=manifest.quantization_digest,
        quantization=manifest.quantization,
        layers=manifest.layers,
        wire_dtype=options.wire_dtype,
        context_tokens=options.context_tokens,
        kv_type=options.kv_type,
        backend=build_identity(),
    )


def _worker_configs(
    model: ModelDescription,
    options: RunOptions,
    orders: list[SliceOrder],
    places: list[Placement],
    driver: Driver,
    driver_keys: NodeKeys | None,
) -> list[WorkerConfig]:
    """One configuration a stage; each worker has keys of its own and lets only its peers in."""
    quantization = main_quantization(model)
    backend = BackendSettings(
        context_tokens=options.context_tokens,
        max_sessions=options.max_sessions,
        chunk_tokens=options.chunk(quantization),
        kv_type=options.kv_type,
        threads=options.threads,
        gpu_layers=options.gpu_layers,
        blas=options.blas,
    )
    keys = [NodeKeys.generate() if driver_keys else None for _ in orders]
    for index, key in enumerate(keys):
        if key is not None:
            driver.peers.allowed.allow(key.public, f"stage-{index}")
    driver_public = driver_keys.public if driver_keys else ""
    peers = [(driver_public, "driver"), *((key.public, f"stage-{i}") for i, key in enumerate(keys) if key is not None)]
    allowed = tuple(AllowedPeer(public=public, name=name) for public, name in peers if public)
    return [
        WorkerConfig(
            stage=index,
            num_stages=len(orders),
            order=order,
            main_quantization=quantization,
            settings=backend,
            hello=replace(driver.settings.hello, stage=index, node=place.node),
            wire_dtype=options.wire_dtype,
            deterministic=options.deterministic,
            sent_log_bytes=options.sent_log_bytes,
            listen=_listen(place.host),
            advertise_host=place.host,
            driver_address=driver.address,
            driver_key=driver_public,
            public_key=key.public if key else "",
            secret_key=key.secret if key else "",
            allowed=allowed,
        )
        for index, (order, place, key) in enumerate(zip(orders, places, keys, strict=True))
    ]


def _replica_config(config: WorkerConfig) -> WorkerConfig:
    """A second worker of the same stage. Replicas share the stage's keys: whoever lets one in lets in the other."""
    hello = replace(config.hello, stage=config.stage + REPLICA_STAGE)
    return replace(config, replica=True, hello=hello)


def _started(engine: ClusterEngine, configs: list[WorkerConfig], places: list[Placement]) -> ClusterEngine:
    """Start all workers, at once."""
    try:
        for place, config in zip(places, configs, strict=True):
            engine.start(worker_spec(worker_name(config.stage), config, place))
    except BaseException:
        engine.close()
        raise
    return engine
