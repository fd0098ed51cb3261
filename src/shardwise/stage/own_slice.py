"""What a worker does before it loads: get its slice, check it, and say in its own words what it holds.

    SliceOrder -> (fetch what is missing into this node's store) -> verify -> StageFiles for the backend
               -> Hello: digests from the manifest that was checked, versions from the libraries that are installed here

**Promises** nothing is mapped whose every bit was not checked once on
this node (`paranoid`: at every start), and the `Hello` is this side's truth, never an echo of the driver's. **Fails with**
`CorruptWeightsError` (file, tensor, expected, actual), `NetworkError`, `UsageError` (disk space). **Called by** the worker.
"""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

import shardwise
from shardwise.clock import SystemClock
from shardwise.errors import CorruptWeightsError
from shardwise.records import Record, replace
from shardwise.shards.manifest import Manifest
from shardwise.shards.progress import ProgressMeter, TransferProgress
from shardwise.shards.stage_paths import StageFiles, paths_of, stage_files
from shardwise.shards.verification import ensure_verified
from shardwise.shards.verify import paths_in
from shardwise.transport.handshake import Hello
from shardwise.transport.messages import PROTOCOL_VERSION
from shardwise.transport.security.keys import NodeKeys
from shardwise.transport.security.state_dir import own_keys


class PieceAddress(Record):
    """A node that serves pieces."""

    address: str
    public_key: str


class SliceOrder(Record):
    """Which slice a worker must hold, and where it can be had."""

    manifest: Manifest
    paths: tuple[str, ...] = ()  # of the stage's files, in order; used where they are on this node, fetched otherwise
    record_dir: str = ""  # where it is noted that `paths` were verified
    paranoid: bool = False  # read every byte at every start
    store: str = ""  # folder of this node's store; "" = the user's cache
    model_files: tuple[str, ...] = ()  # the model's own files, where this node may have them
    folders: tuple[str, ...] = ()  # packed folders that are mounted here
    peers: tuple[PieceAddress, ...] = ()
    peer_bytes_per_s: float | None = None


OnPreparing = Callable[[str, TransferProgress], None]  # (fetching | verifying, how far)


@contextlib.contextmanager
def own_slice(
    order: SliceOrder,
    stage: int,
    context: zmq.Context[zmq.Socket[bytes]],
    keys: NodeKeys | None,
    *,
    progress: OnPreparing = lambda what, how: None,
) -> Iterator[StageFiles]:
    """Verified files of a stage; while the block runs they are not collected. `keys`: to ask peers with."""
    wanted = order.manifest.stages[stage]
    key = own_keys().derive("verification")
    meter = ProgressMeter(wanted.num_bytes, lambda how: progress("verifying", how), SystemClock())
    verify = functools.partial(ensure_verified, stage=wanted, key=key, paranoid=order.paranoid, on_bytes=meter.add)
    if order.paths and all(Path(path).exists() for path in order.paths):
        paths = paths_of(wanted, order.paths)
        verify(paths, record_dir=Path(order.record_dir))
        yield stage_files(order.manifest, stage, paths)
        return
    from shardwise.stage.fetching import fetched_slice  # here: a start with everything in its place does without

    with fetched_slice(order, wanted, key, context, keys, lambda how: progress("fetching", how)) as (folder, discard):
        paths = paths_in(folder, wanted.files)
        try:
            verify(paths, record_dir=folder)
        except CorruptWeightsError:
            discard()  # the next start fetches it again
            raise
        yield stage_files(order.manifest, stage, paths)


def own_hello(told: Hello, manifest: Manifest | None, backend: str, device: str) -> Hello:
    """What this side holds. Deployment, epoch, node and stage are what it was started as; the rest is its own.

    `backend` is `library.build_identity()`, `device` what it computes on.
    """
    own = replace(
        told,
        protocol_version=PROTOCOL_VERSION,
        backend=backend,
        device=device,
        shardwise_version=shardwise.__version__,
        platform=f"{platform.system()} {platform.machine()}",
    )
    return own if manifest is None else of_manifest(own, manifest)


def of_manifest(hello: Hello, manifest: Manifest) -> Hello:
    """The fields that a manifest decides."""
    return replace(
        hello,
        manifest_digest=manifest.digest,
        revision_digest=manifest.revision_digest,
        tokenizer_digest=manifest.tokenizer_digest,
        quantization_digest=manifest.quantization_digest,
        quantization=manifest.quantization,
        layers=manifest.layers,
        wire_dtype=manifest.settings.wire_dtype,
        context_tokens=manifest.settings.context_tokens,
        kv_type=manifest.settings.kv_type,
    )
