"""From an order to verified files, telling the driver meanwhile how far it is. The bytes move in threads of their own; the
worker's thread, to which the sockets belong, only reports. Fails like `own_slice`. **Called by** the worker, after its
driver's welcome.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor, wait

import zmq

from shardwise.errors import StageLoadFailed
from shardwise.records import replace
from shardwise.shards.progress import TransferProgress
from shardwise.shards.stage_paths import StageFiles
from shardwise.stage.config import WorkerConfig
from shardwise.stage.links import Links
from shardwise.stage.llama import library
from shardwise.stage.own_slice import own_hello, own_slice
from shardwise.transport.messages import Preparing
from shardwise.transport.security.keys import NodeKeys

REPORT_EVERY_S = 0.25


def with_own_hello(config: WorkerConfig) -> WorkerConfig:
    """The configuration with a hello that says what this worker really has."""
    manifest = config.order.manifest if config.order is not None else None
    return replace(config, hello=own_hello(config.hello, manifest, library.build_identity(), library.device_name()))


def obtain(config: WorkerConfig, links: Links, context: zmq.Context[zmq.Socket[bytes]], held: contextlib.ExitStack) -> StageFiles:
    """Verified files; they stay until `held` is closed."""
    if config.order is None:
        if config.files is None:
            raise StageLoadFailed("no slice was ordered and no files were given", where=f"stage {config.stage}")
        return config.files
    latest: list[tuple[str, TransferProgress]] = []
    keys = NodeKeys(config.public_key, config.secret_key) if config.public_key else None
    slice_ = own_slice(config.order, config.stage, context, keys, progress=lambda what, how: latest.append((what, how)))
    with ThreadPoolExecutor(1, thread_name_prefix="shardwise-obtain") as pool:
        future = pool.submit(slice_.__enter__)
        while not wait([future], timeout=REPORT_EVERY_S).done:
            if latest:
                _tell(links, config.stage, *latest[-1])
                latest.clear()
    files = future.result()
    held.push(slice_)
    return files


def _tell(links: Links, stage: int, what: str, progress: TransferProgress) -> None:
    links.to_driver(
        Preparing(
            stage=stage,
            what=what,
            done_bytes=progress.done_bytes,
            total_bytes=progress.total_bytes,
            bytes_per_s=progress.bytes_per_s,
            left_s=progress.left_s,
        )
    )
