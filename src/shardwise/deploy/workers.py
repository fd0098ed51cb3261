"""What an engine is told to start: worker configurations from a split, its places and the session driver's address.

A `Layout` is one split of a model over places, with the names of its workers and of their replicas. It changes when a replica
is promoted or a stage moves; a new split is a new `Layout` with names of its own, so that both can run for a while.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq

from shardwise.cluster.engine import WorkerSpec
from shardwise.deploy.options import Placement, RunOptions, main_quantization
from shardwise.deploy.slices import servable_pieces, slice_orders
from shardwise.errors import StageCrashed
from shardwise.model.description import ModelDescription
from shardwise.records import replace
from shardwise.session.peers import Peers
from shardwise.shards.manifest import Manifest
from shardwise.stage.config import AllowedPeer, WorkerConfig
from shardwise.stage.llama.library import build_identity
from shardwise.stage.own_slice import PieceAddress, SliceOrder
from shardwise.stage.settings import BackendSettings
from shardwise.transport.handshake import REPLICA_STAGE, Hello
from shardwise.transport.pieces import PieceServer
from shardwise.transport.security.keys import NodeKeys

LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")


@dataclass(slots=True)
class Replica:
    """A second worker of a stage. It shares the stage's keys: whoever lets one in lets in the other."""

    name: str
    place: Placement


@dataclass(slots=True)
class Layout:
    """See the module."""

    model: ModelDescription
    options: RunOptions
    manifest: Manifest
    configs: list[WorkerConfig]
    places: list[Placement]
    names: list[str]
    pieces: PieceServer | None = None
    replicas: dict[int, Replica] = field(default_factory=dict)

    def spec(self, stage: int, epoch: int, *, replica: bool = False) -> WorkerSpec:
        """What an engine needs to start the stage's worker, or its replica, at its present place."""
        found = self.replicas[stage] if replica else Replica(self.names[stage], self.places[stage])
        config, place = self.configs[stage], found.place
        hello = replace(config.hello, stage=stage + REPLICA_STAGE if replica else stage, epoch=epoch, node=place.node)
        config = replace(config, replica=replica, hello=hello, listen=listen_on(place.host), advertise_host=place.host)
        return WorkerSpec(name=found.name, node=place.node, config=config.frame(), device=place.device, prefix=place.prefix)

    def promote(self, stage: int) -> None:
        """The replica takes the stage's place; what remains in `replicas` is where the lost one was."""
        replica = self.replicas[stage]
        self.replicas[stage] = Replica(self.names[stage], self.places[stage])
        self.names[stage], self.places[stage] = replica.name, replica.place

    def place_on(self, node: str) -> Placement | None:
        """A known way to run something on that node."""
        known = [*self.places, *(replica.place for replica in self.replicas.values())]
        return next((place for place in known if place.node == node), None)

    @property
    def worker_names(self) -> list[str]:
        return [*self.names, *(replica.name for replica in self.replicas.values())]


def worker_name(stage: int, generation: int = 0) -> str:
    """The name of a stage's worker within its deployment; every new split is a generation."""
    return f"stage-{stage}" if generation == 0 else f"stage-{stage}.{generation}"


def crash_error(name: str, exit_status: int | None, log_tail: str) -> StageCrashed:
    """The error for a worker process that ended."""
    status = exit_status if exit_status is not None else "unknown"
    how = f"signal {-status}" if isinstance(status, int) and status < 0 else f"status {status}"
    last = log_tail.strip().splitlines()[-1:] or ["no output"]
    return StageCrashed(f"the worker {name} ended with {how}: {last[0]}", where=name, exit_status=status, log_tail=log_tail)


def listen_on(host: str) -> str:
    """Any free port of an address."""
    return f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"


def hello_of(manifest: Manifest, options: RunOptions, epoch: int = 1) -> Hello:
    """What the session driver holds."""
    return Hello(
        deployment=manifest.model,
        epoch=epoch,
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


def make_layout(
    model: ModelDescription,
    options: RunOptions,
    manifest: Manifest,
    places: list[Placement],
    peers: Peers,
    driver_host: str,
    keys: NodeKeys | None,
    context: zmq.Context[zmq.Socket[bytes]],
    generation: int = 0,
) -> Layout:
    """Configurations of all workers; pieces are served where some of them run on other machines."""
    pieces = _serve_pieces(model, manifest, options, places, peers, driver_host, keys, context)
    sources = (PieceAddress(address=pieces.address, public_key=keys.public),) if pieces is not None and keys is not None else ()
    orders = slice_orders(model, manifest, options, sources)
    return Layout(
        model=model,
        options=options,
        manifest=manifest,
        configs=_worker_configs(model, options, orders, places, peers, keys),
        places=list(places),
        names=[worker_name(stage, generation) for stage in range(len(orders))],
        pieces=pieces,
    )


def _serve_pieces(
    model: ModelDescription,
    manifest: Manifest,
    options: RunOptions,
    places: list[Placement],
    peers: Peers,
    host: str,
    keys: NodeKeys | None,
    context: zmq.Context[zmq.Socket[bytes]],
) -> PieceServer | None:
    """Where stages run on other machines: hand out what they lack, to this deployment's workers only."""
    if keys is None or all(place.host in LOCAL_HOSTS for place in places):
        return None
    source = servable_pieces(model, manifest, options)
    return PieceServer(context, listen_on(host), lambda: source, keys=keys, allowed=peers.allowed)


def _worker_configs(
    model: ModelDescription,
    options: RunOptions,
    orders: list[SliceOrder],
    places: list[Placement],
    driver: Peers,
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
            driver.allowed.allow(key.public, f"stage-{index}")
    driver_public = driver_keys.public if driver_keys else ""
    peers = [(driver_public, "driver"), *((key.public, f"stage-{i}") for i, key in enumerate(keys) if key is not None)]
    allowed = tuple(AllowedPeer(public=public, name=name) for public, name in peers if public)
    return [
        WorkerConfig(
            stage=index,
            num_stages=len(orders),
            order=order,
            main_quantization=quantization,
            settings=replace(backend, stages_here=sum(other.host == place.host for other in places)),
            hello=replace(driver.hello, stage=index, node=place.node),
            wire_dtype=options.wire_dtype,
            deterministic=options.deterministic,
            sent_log_bytes=options.sent_log_bytes,
            driver_address=driver.address_for(index),
            driver_key=driver_public,
            public_key=key.public if key else "",
            secret_key=key.secret if key else "",
            allowed=allowed,
        )
        for index, (order, place, key) in enumerate(zip(orders, places, keys, strict=True))
    ]
