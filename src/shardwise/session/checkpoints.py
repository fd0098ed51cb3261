"""KV checkpoints of running sessions: what bounds the refill of a lost stage in long sessions.

    every N tokens: driver -- ExportKv --> stages -- KvState + payload --> kept here, in memory or in a directory
    a stage was lost: kept -- KvState + payload --> the rebuilt stage, which verifies it and says so -- then OpenSession(resume)

Each stage's checkpoint replaces its earlier one. llama.cpp hands out a sequence's state as a whole, so every checkpoint is a
whole one; a backend that can hand out a range would only send what is new.

**Promises** a checkpoint is used only for the split, the stage and the very tokens that it was made of, and only if its SHA-256
is right; one that is not is left out with a note, and the rows are computed again. A session's checkpoints are used only where
every rebuilt stage has one, so that no stage waits for rows that nobody kept. **Fails when** the directory cannot be written
(`UsageError` at the start; later: a note, and that checkpoint is not there). **Called by** `restoring`, in the driver's thread.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from shardwise.errors import UsageError
from shardwise.records import Record
from shardwise.session.session import Session
from shardwise.transport.messages import ExportKv, KvState

MAGIC = b"shardwise kv 1\n"
MEMORY_BYTES = 512 * 2**20  # without a directory; more is not kept
_HEAD = len(MAGIC) + 4

Send = Callable[[int, ExportKv | KvState, bytes | None], None]  # stage, message, payload


class CheckpointSettings(Record):
    """`every_tokens` 0 = none; `directory` "" = in the driver's memory."""

    every_tokens: int = 0
    directory: str = ""


class Checkpoint(Record):
    """What one stage had computed of a session."""

    manifest_digest: str
    stage: int
    num_tokens: int
    tokens_digest: str  # of the token ids that these positions hold
    digest: str  # SHA-256 of the payload


class Store:
    """The latest checkpoint of each session and stage."""

    def __init__(self, directory: str, on_note: Callable[[str], None]) -> None:
        self._folder = Path(directory) if directory else None
        self._kept: dict[tuple[str, int], tuple[Checkpoint, bytes]] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="shardwise-checkpoints")
        self.on_note = on_note
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise UsageError(
                    f"cannot write checkpoints: {error}", where=directory, hint="choose another directory"
                ) from error

    def put(self, key: str, checkpoint: Checkpoint, payload: bytes) -> None:
        """Replace the stage's earlier one; files are written by a thread of their own and appear whole."""
        if self._folder is not None:
            self._writer.submit(self._write, self._path(key, checkpoint.stage), checkpoint, payload)
            return
        others = sum(len(kept) for at, (_, kept) in self._kept.items() if at != (key, checkpoint.stage))
        if others + len(payload) > MEMORY_BYTES:
            self.on_note(f"checkpoint of {len(payload)} bytes not kept: {MEMORY_BYTES} bytes are the limit; give a directory")
            return
        self._kept[key, checkpoint.stage] = (checkpoint, payload)

    def get(self, key: str, stage: int) -> tuple[Checkpoint, bytes] | None:
        """The stage's checkpoint, verified; None where there is none, or one that is damaged (with a note)."""
        found = self._read(self._path(key, stage)) if self._folder is not None else self._kept.get((key, stage))
        if found is None:
            return None
        checkpoint, payload = found
        if (actual := hashlib.sha256(payload).hexdigest()) != checkpoint.digest:
            what = f"expected {checkpoint.digest}, found {actual}"
            self.on_note(f"the checkpoint of stage {stage} is damaged ({what}): its rows are computed again")
            return None
        return found

    def forget(self, key: str, stages: Iterable[int]) -> None:
        """The session is over."""
        for stage in stages:
            self._kept.pop((key, stage), None)
            if self._folder is not None:
                path = self._path(key, stage)
                self._writer.submit(path.unlink, missing_ok=True)

    def close(self) -> None:
        """Everything that was put is on the disk afterwards."""
        self._writer.shutdown(wait=True)

    def flush(self) -> None:
        """Wait for what was put."""
        self._writer.submit(lambda: None).result()

    def _path(self, key: str, stage: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{key}.{stage}.kv"

    def _write(self, path: Path, checkpoint: Checkpoint, payload: bytes) -> None:
        head = msgspec.msgpack.encode(checkpoint)
        part = path.with_suffix(".part")
        try:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(MAGIC + len(head).to_bytes(4, "little") + head)
                file.write(payload)
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            self.on_note(f"checkpoint not written: {error}")

    def _read(self, path: Path) -> tuple[Checkpoint, bytes] | None:
        self.flush()
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.on_note(f"checkpoint not readable: {error}")
            return None
        size = int.from_bytes(data[len(MAGIC) : _HEAD], "little")
        try:
            if not data.startswith(MAGIC):
                raise msgspec.DecodeError("no checkpoint")
            return msgspec.msgpack.decode(data[_HEAD : _HEAD + size], type=Checkpoint), data[_HEAD + size :]
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            self.on_note(f"{path.name} is damaged ({error}): its rows are computed again")
            return None


class Checkpoints:
    """Asks for checkpoints while sessions run, and puts them back after a fault."""

    def __init__(self, settings: CheckpointSettings) -> None:
        self._every_tokens = settings.every_tokens
        self.on_disk = bool(settings.directory)
        self.on_note: Callable[[str], None] = lambda what: None
        self.store = Store(settings.directory, self.note) if settings.every_tokens else None
        self._asked: dict[int, int] = {}  # session -> position when the latest was asked for
        self.num_tokens: dict[tuple[int, int], int] = {}  # (session, stage) -> positions of its latest checkpoint
        self._awaited: dict[int, set[int]] = {}  # session -> stages that are being restored

    def note(self, what: str) -> None:
        """Say something to whoever watches."""
        self.on_note(what)

    def after_token(self, session: Session, stages: Iterable[int], send: Send) -> None:
        """Ask every stage for the session's state, if it is time."""
        if self.store is None or session.next_position < self._asked.get(session.number, 0) + self._every_tokens:
            return
        self._asked[session.number] = session.next_position
        for stage in stages:
            send(stage, ExportKv(session=session.number, epoch=session.epoch, request=session.next_position), None)

    def take(self, session: Session, message: KvState, payload: memoryview, manifest_digest: str) -> None:
        """A stage's state has come. States beyond the tokens that are known here are of no use."""
        tokens = session.tokens
        if self.store is None or message.epoch != session.epoch or message.num_tokens > len(tokens):
            return
        checkpoint = Checkpoint(
            manifest_digest=manifest_digest,
            stage=message.stage,
            num_tokens=message.num_tokens,
            tokens_digest=tokens_digest(tokens[: message.num_tokens]),
            digest=message.digest,
        )
        self.store.put(session_key(session), checkpoint, bytes(payload))
        self.num_tokens[session.number, message.stage] = message.num_tokens

    def restore(self, session: Session, stages: Collection[int], manifest_digest: str, send: Send) -> int:
        """Send a session's checkpoints to rebuilt stages; positions that they will hold, 0 = there is nothing to wait for."""
        if self.store is None or not stages or not session.generated:
            return 0
        found = [self.store.get(session_key(session), stage) for stage in sorted(stages)]
        tokens = session.tokens
        good = [kept for kept in found if kept is not None and _fits(kept[0], manifest_digest, tokens)]
        if len(good) < len(stages):
            return 0
        for checkpoint, payload in good:
            send(
                checkpoint.stage,
                KvState(
                    session=session.number,
                    epoch=session.epoch,
                    stage=checkpoint.stage,
                    request=0,
                    num_tokens=checkpoint.num_tokens,
                    digest=checkpoint.digest,
                ),
                payload,
            )
        self._awaited[session.number] = set(stages)
        # The last row of what is known here is computed in any case: surviving stages downstream may lack it.
        return min(len(tokens) - 1, *(checkpoint.num_tokens for checkpoint, _ in good))

    def answered(self, session: int, stage: int) -> bool:
        """A stage has its state, or could not take it; whether that was the last one awaited."""
        awaited = self._awaited.get(session)
        if awaited is None:
            return False
        awaited.discard(stage)
        if awaited:
            return False
        del self._awaited[session]
        return True

    def interrupted(self) -> None:
        """Another fault: whatever was under way does not count."""
        self._awaited.clear()

    def forget(self, session: Session, num_stages: int) -> None:
        """The session is over."""
        if self.store is not None and self._asked.pop(session.number, None) is not None:
            self.store.forget(session_key(session), range(num_stages))
            for stage in range(num_stages):
                self.num_tokens.pop((session.number, stage), None)

    def new_split(self) -> None:
        """Nothing that was kept fits the stages any more."""
        self._asked.clear()
        self.num_tokens.clear()
        self._awaited.clear()

    def close(self) -> None:
        """What was kept in a directory stays, for the next driver."""
        if self.store is not None:
            self.store.close()


def session_key(session: Session) -> str:
    """The same for a session that another driver goes on with. Equal requests share it: their states are then equal too, or
    are told apart by the tokens."""
    return hashlib.sha256(msgspec.msgpack.encode(session.request)).hexdigest()[:24]


def tokens_digest(tokens: Iterable[int]) -> str:
    """Of token ids."""
    return hashlib.sha256(msgspec.msgpack.encode(tuple(tokens))).hexdigest()


def _fits(checkpoint: Checkpoint, manifest_digest: str, tokens: tuple[int, ...]) -> bool:
    return (
        checkpoint.manifest_digest == manifest_digest
        and 0 < checkpoint.num_tokens <= len(tokens)
        and checkpoint.tokens_digest == tokens_digest(tokens[: checkpoint.num_tokens])
    )
