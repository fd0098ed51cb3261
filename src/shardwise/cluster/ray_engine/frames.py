"""What `RayEngine` and its broker process say to each other over a pipe: strict records behind a length.

Commands flow to the broker's standard input, reports back. **Fails when** the other side is gone (`EOFError`) or
speaks something else (`ProtocolMismatch`).
"""

from __future__ import annotations

from typing import BinaryIO

import msgspec

from shardwise.cluster.engine import NodeInfo, WorkerSpec, WorkerStatus
from shardwise.errors import ProtocolMismatch, ShardwiseError, from_record
from shardwise.records import Record

MAX_FRAME_BYTES = 64 * 2**20
_LENGTH_BYTES = 4


class Frame(Record, tag_field="t"):
    """Base of all frames."""


class FailureNote(Record):
    """An error as plain data."""

    kind: str
    message: str
    where: str = ""
    hint: str = ""
    details: dict[str, str | int | float] = {}

    @classmethod
    def of(cls, error: ShardwiseError) -> FailureNote:
        details = {k: v for k, v in error.details.items() if isinstance(v, str | int | float)}
        return cls(kind=type(error).__name__, message=error.message, where=error.where, hint=error.hint, details=details)

    def error(self) -> ShardwiseError:
        """The error again."""
        return from_record(self.kind, self.message, self.where, self.hint, dict(self.details))


class Attach(Frame, tag="attach"):
    """First command: which cluster."""

    head: str
    own_ip: str


class StartWorker(Frame, tag="start"):
    request: int
    spec: WorkerSpec


class StopWorker(Frame, tag="stop"):
    request: int
    name: str
    grace_s: float


class Answer(Frame, tag="answer"):
    """To a command, after the report that shows its effect."""

    request: int
    failure: FailureNote | None = None


class Report(Frame, tag="report"):
    """Everything that is known, whenever it changes."""

    nodes: tuple[NodeInfo, ...]
    statuses: tuple[WorkerStatus, ...]


class Broken(Frame, tag="broken"):
    """The broker cannot go on; it ends."""

    failure: FailureNote


AnyFrame = Attach | StartWorker | StopWorker | Answer | Report | Broken
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyFrame] = msgspec.msgpack.Decoder(AnyFrame)


def write_frame(stream: BinaryIO, frame: AnyFrame) -> None:
    """Send one frame at once."""
    body = _encoder.encode(frame)
    stream.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
    stream.flush()


def read_frame(stream: BinaryIO) -> AnyFrame:
    """The next frame."""
    length = int.from_bytes(_exactly(stream, _LENGTH_BYTES), "little")
    if length > MAX_FRAME_BYTES:
        raise ProtocolMismatch(f"a frame of {length} bytes from the Ray broker", hint=f"at most {MAX_FRAME_BYTES} are allowed")
    try:
        return _decoder.decode(_exactly(stream, length))
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolMismatch(f"not a frame of the Ray broker: {error}") from error


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("the other side is gone")
    return data
