"""A slice that is not where it was ordered: found in this node's store, or fetched into it piece by piece.

`SHARDWISE_STORE_CAP` limits what the store keeps. **Promises** what is handed out is held: nobody collects it meanwhile.
**Fails with** `NetworkError`, `CorruptWeightsError`, `UsageError` (disk space). **Called by** `own_slice`, which verifies.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

from shardwise.errors import CorruptWeightsError
from shardwise.shards.manifest import StageSlice
from shardwise.shards.pieces import PieceSource, pieces_of_folder, pieces_of_model
from shardwise.shards.progress import OnTransfer
from shardwise.shards.store import ShardStore, default_cap_bytes, default_store
from shardwise.shards.transfer import TransferOptions
from shardwise.stage.own_slice import SliceOrder
from shardwise.transport.pieces import PeerPieces
from shardwise.transport.security.keys import NodeKeys

log = logging.getLogger("shardwise.stage")


@contextlib.contextmanager
def fetched_slice(
    order: SliceOrder,
    wanted: StageSlice,
    key: bytes,
    context: zmq.Context[zmq.Socket[bytes]],
    keys: NodeKeys | None,
    progress: OnTransfer,
) -> Iterator[tuple[Path, Callable[[], None]]]:
    """The slice's folder, and how to throw it away; it is held while the block runs."""
    store = ShardStore(Path(order.store) if order.store else default_store())
    with store.hold([wanted]):
        folder = store.find(wanted)
        if folder is None:
            with contextlib.ExitStack() as stack:
                sources = _local_sources(order)
                for peer in order.peers:
                    if keys is not None:
                        pieces = PeerPieces(context, peer.address, keys=keys, peer_public=peer.public_key)
                        sources.append(stack.enter_context(pieces))
                options = TransferOptions(peer_bytes_per_s=order.peer_bytes_per_s)
                folder, _ = store.fetch(wanted, sources, key=key, options=options, progress=progress)
            if (cap_bytes := default_cap_bytes()) is not None:
                store.collect(cap_bytes)  # what is held, this slice among it, stays
        yield folder, lambda: store.discard(wanted)


def _local_sources(order: SliceOrder) -> list[PieceSource]:
    """Folders and model files that are here; one that is not what it should be is passed over, the bytes come from elsewhere."""
    sources: list[PieceSource] = []
    for folder in map(Path, order.folders):
        if folder.is_dir():
            with _passed_over(folder):
                sources.append(pieces_of_folder(folder))
    files = [Path(path) for path in order.model_files]
    if files and all(path.is_file() for path in files):
        with _passed_over(files[0]):
            sources.append(pieces_of_model(order.manifest, files))
    return sources


@contextlib.contextmanager
def _passed_over(path: Path) -> Iterator[None]:
    try:
        yield
    except CorruptWeightsError as error:
        log.warning("%s is passed over: %s", path, error.one_line())
