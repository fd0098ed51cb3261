"""What a worker process is told on its standard input: one JSON record, keys included, so that nothing secret is on a
command line. The first eight bytes are its length; after it the pipe stays open, and its end means: the parent is gone.
"""

from __future__ import annotations

import sys
from typing import BinaryIO

from shardwise.errors import StageLoadFailed
from shardwise.records import Record, from_json, to_json
from shardwise.shards.stage_paths import StageFiles
from shardwise.stage.own_slice import SliceOrder
from shardwise.stage.settings import BackendSettings
from shardwise.transport.handshake import Hello

MAX_CONFIG_BYTES = 2**24


class AllowedPeer(Record):
    """A public key that may connect to this worker."""

    public: str
    name: str


class WorkerConfig(Record):
    """One stage worker."""

    stage: int
    num_stages: int
    order: SliceOrder | None = None  # what it must hold; it is fetched and verified before it is loaded
    files: StageFiles | None = None  # without an order: files that are taken as they are
    main_quantization: str  # of most weights; decides about BLAS
    settings: BackendSettings
    hello: Hello
    wire_dtype: str = "f32"  # f32 | f16
    deterministic: bool = False  # every session's rows in steps of their own
    listen: str = "tcp://127.0.0.1:*"
    advertise_host: str = ""  # what others connect to; "" = the listening address
    driver_address: str = ""
    driver_key: str = ""
    public_key: str = ""  # "" = no encryption
    secret_key: str = ""
    allowed: tuple[AllowedPeer, ...] = ()
    sent_log_bytes: int = 64 * 2**20  # of activations kept for refilling the next stage after a fault; 0 = none
    replica: bool = False  # stands by for `stage`: it computes what it is sent and says nothing until it is connected
    prefill_window: int = 4  # chunks that may be under way to the next stage

    def frame(self) -> bytes:
        """The JSON that `read_config` reads."""
        return to_json(self)


def read_config(stream: BinaryIO | None = None) -> WorkerConfig:
    """Read one framed record; `StageLoadFailed` where the parent said nothing sensible."""
    source = stream or sys.stdin.buffer
    size = int.from_bytes(source.read(8), "little")
    if not 0 < size <= MAX_CONFIG_BYTES:
        raise StageLoadFailed(f"a configuration of {size} bytes", where="standard input")
    return from_json(source.read(size), WorkerConfig, where="standard input")
