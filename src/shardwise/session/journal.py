"""The session journal: append-only, checksummed; what a restarted driver needs to go on with its sessions.

File: the magic line, then frames of `length (4 bytes) | chain digest (8 bytes) | MessagePack event`. The digest covers the
previous digest and the event (BLAKE2b), so a frame that is damaged, missing, repeated or out of place ends the readable
part. Reading always yields a prefix of what was written; opening for writing cuts the file back to that prefix.

**Promises** after a torn write or any flipped bits: a prefix, never a wrong token. An event is handed to the operating system
before `append` returns; `sync` forces it to the disk. One process at a time writes it. Sessions that have ended are dropped when
it is opened, and when it has grown by `GROWTH_BYTES`. **Fails with** `UsageError` where the directory cannot be written, or
another process writes there. **Called by** `journalling`.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from shardwise.errors import UsageError
from shardwise.records import Record
from shardwise.session.request import GenerationRequest
from shardwise.shards.locks import FileLock

MAGIC = b"shardwise journal 1\n"
MAX_EVENT_BYTES = 16 * 2**20
GROWTH_BYTES = 4 * 2**20
_HEAD = 12


class SessionEvent(Record, tag_field="e"):
    """Base of all events."""

    session: int


class Opened(SessionEvent, tag="open"):
    """A session began."""

    request: GenerationRequest
    manifest_digest: str = ""


class Generated(SessionEvent, tag="token"):
    """A token was given out."""

    position: int
    token: int


class Ended(SessionEvent, tag="end"):
    """The session is over: stop | length | cancelled | error."""

    reason: str


AnyEvent = Opened | Generated | Ended
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyEvent] = msgspec.msgpack.Decoder(AnyEvent)


class Unfinished(Record):
    """A session that was under way when the journal ended."""

    session: int
    request: GenerationRequest
    generated: tuple[int, ...]
    manifest_digest: str = ""


def _chain(previous: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(previous + body, digest_size=8).digest()


def read_events(data: bytes) -> tuple[list[AnyEvent], int, bytes]:
    """The readable prefix of a journal: events, its length in bytes, and the digest to go on from."""
    if not data.startswith(MAGIC):
        return [], 0, b""
    at, digest, events = len(MAGIC), b"", []
    while at + _HEAD <= len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        body = data[at + _HEAD : at + _HEAD + size]
        if size > MAX_EVENT_BYTES or len(body) != size or data[at + 4 : at + _HEAD] != _chain(digest, body):
            break
        try:
            events.append(_decoder.decode(body))
        except (msgspec.DecodeError, msgspec.ValidationError):
            break
        at, digest = at + _HEAD + size, data[at + 4 : at + _HEAD]
    return events, at, digest


def unfinished_sessions(events: list[AnyEvent]) -> list[Unfinished]:
    """Sessions that were opened and not ended. A token out of place ends that session's known part."""
    requests: dict[int, Opened] = {}
    tokens: dict[int, list[int]] = {}
    broken: set[int] = set()
    for event in events:
        match event:
            case Opened():
                requests[event.session], tokens[event.session] = event, []
                broken.discard(event.session)
            case Generated():
                opened = requests.get(event.session)
                if opened is None or event.session in broken:
                    continue
                if event.position != len(opened.request.prompt) + len(tokens[event.session]):
                    broken.add(event.session)
                    continue
                tokens[event.session].append(event.token)
            case Ended():
                requests.pop(event.session, None)
    return [
        Unfinished(session=n, request=o.request, generated=tuple(tokens[n]), manifest_digest=o.manifest_digest)
        for n, o in requests.items()
    ]


class Journal:
    """Appends events to one file, after repairing its tail."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "sessions.journal"
        self._lock = FileLock(directory / "sessions.lock")
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self._lock.try_acquire():
                hint = "wait until it has ended, or choose another --journal"
                raise UsageError("another process writes this journal", where=str(directory), hint=hint)
            data = self.path.read_bytes() if self.path.exists() else b""
            events, length, self._digest = read_events(data)
            self.unfinished = unfinished_sessions(events)
            self.next_session = 1 + max((event.session for event in events), default=0)
            self._file: BinaryIO = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
            self._file.truncate(length)
            self._file.seek(length)
            if length == 0:
                self._file.write(MAGIC)
            self._compact_at = length + GROWTH_BYTES
            if any(isinstance(event, Ended) for event in events):
                self.compact()
        except OSError as error:
            self._lock.release()
            raise UsageError(
                f"cannot write the journal: {error}", where=str(directory), hint="choose another --journal"
            ) from error

    def append(self, event: AnyEvent) -> None:
        """Write one event; it survives the end of this process. `OSError` where the disk does not take it: then the file is as
        it was before, and later events may be tried."""
        body = _encoder.encode(event)
        digest = _chain(self._digest, body)
        frame = len(body).to_bytes(4, "little") + digest + body
        begin = self._file.tell()
        try:
            while frame:  # a disk that has just become full takes a part
                frame = frame[self._file.write(frame) or 0 :]
        except OSError:
            self._cut_back(begin)
            raise
        self._digest = digest
        if isinstance(event, Ended) and self._file.tell() >= self._compact_at:
            try:
                self.compact()
            except OSError:  # the old file is still there
                self._compact_at += GROWTH_BYTES

    def _cut_back(self, length: int) -> None:
        """Nothing that follows a torn frame could be read: where it cannot be cut off, nothing more is written."""
        try:
            self._file.truncate(length)
            self._file.seek(length)
        except OSError:
            self._file.close()

    def sync(self) -> None:
        """Force everything to the disk."""
        os.fsync(self._file.fileno())

    def compact(self) -> None:
        """Begin a new file with the unfinished sessions only, in one atomic step."""
        events, _, _ = read_events(self.path.read_bytes())
        kept: list[AnyEvent] = []
        for session in unfinished_sessions(events):
            kept.append(Opened(session=session.session, request=session.request, manifest_digest=session.manifest_digest))
            start = len(session.request.prompt)
            kept += [Generated(session=session.session, position=start + i, token=t) for i, t in enumerate(session.generated)]
        beside = self.path.with_suffix(".part")
        digest, frames = b"", [MAGIC]
        for event in kept:
            body = _encoder.encode(event)
            digest = _chain(digest, body)
            frames.append(len(body).to_bytes(4, "little") + digest + body)
        try:
            with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
                out.write(b"".join(frames))
                out.flush()
                os.fsync(out.fileno())
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        self._file.close()
        try:
            beside.replace(self.path)
        finally:
            self._file = self.path.open("r+b", buffering=0)
            self._file.seek(0, os.SEEK_END)
        self._digest = digest
        self._compact_at = self._file.tell() + GROWTH_BYTES

    def close(self) -> None:
        """Harmless when repeated."""
        self._file.close()
        self._lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
