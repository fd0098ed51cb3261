"""Brings a stage's files together from whoever has their pieces: nearest first, in parallel, resumable, hashed while streaming.

In: a `StageSlice`, a directory, sources. Out: the files, whole and on the disk, and a `TransferReport`. Bytes are written in
place into files of their final size; a journal line follows every read, so that a cut at any point loses at most the reads
under way (`num_readers * READ_BYTES`, one chunk). **Promises** no byte stays that does not hash to what the manifest says,
wherever it came from; a source that fails or lies is left for the next one. **Fails when** nobody has a piece or everybody's
copy of it is corrupt (`CorruptWeightsError` with tensor, expected, actual), all that have it are away (`NetworkError`), the
disk is full (`UsageError`). What was fetched stays for the next try. **Called by** the store.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.clock import Clock, SystemClock
from shardwise.errors import ConnectFailed, CorruptWeightsError, NetworkError, ShardwiseError
from shardwise.records import Record
from shardwise.shards.journal import Journal
from shardwise.shards.manifest import Piece, StageSlice, corrupt
from shardwise.shards.pieces import PEER, PieceSource
from shardwise.shards.progress import OnTransfer, ProgressMeter, RateLimit
from shardwise.shards.spans import cannot_write
from shardwise.shards.verify import read_blocks

READ_BYTES = 256 * 1024
CHUNK_BYTES = 2**20  # at most this much is sent twice after a cut
JOURNAL_NAME = "journal"


class TransferOptions(Record):
    """How to fetch."""

    num_readers: int = CHUNK_BYTES // READ_BYTES
    peer_bytes_per_s: float | None = None  # limit on what comes from peers, together


@dataclass(slots=True)
class TransferReport:
    """What came from where. `resumed_bytes` were here from an earlier try."""

    bytes_by_source: dict[str, int] = field(default_factory=dict)
    peer_weight_bytes: int = 0  # tensors
    peer_header_bytes: int = 0  # metadata of slices
    resumed_bytes: int = 0
    discarded_bytes: int = 0  # did not hash to what they must
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Task:
    """One piece of one file."""

    file_index: int
    piece_index: int
    piece: Piece


class Transfer:
    """One stage's files on their way into a directory."""

    def __init__(
        self,
        stage: StageSlice,
        directory: Path,
        sources: Sequence[PieceSource],
        *,
        options: TransferOptions | None = None,
        progress: OnTransfer | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._stage, self._directory = stage, directory
        self._options = options or TransferOptions()
        self._clock = clock or SystemClock()
        self._tasks = [_Task(i, j, piece) for i, file in enumerate(stage.files) for j, piece in enumerate(file.pieces)]
        total_bytes = sum(task.piece.num_bytes for task in self._tasks)
        self._meter = ProgressMeter(total_bytes, progress, self._clock)
        self._limit = RateLimit(self._options.peer_bytes_per_s, self._clock)
        self._sources = sorted(sources, key=lambda source: source.rank)
        self._holders: dict[str, list[PieceSource]] = {}
        self._files: list[BinaryIO] = []
        self._file_locks = [threading.Lock() for _ in stage.files]
        self._report_lock = threading.Lock()
        self._report = TransferReport()
        self._stop = threading.Event()

    def run(self) -> TransferReport:
        """Fetch everything that is missing; returns when all files are whole and on the disk."""
        started_s = self._clock.now_s()
        self._ask_sources()
        journal = Journal(self._directory / JOURNAL_NAME)
        try:
            self._open_files()
            self._fetch_all(journal)
            for file in self._files:
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(self._directory, error) from error
        finally:
            for file in self._files:
                file.close()
            journal.close()
        self._report.duration_s = self._clock.now_s() - started_s
        return self._report

    # -- before -----------------------------------------------------------------------------------------------------

    def _ask_sources(self) -> None:
        """Who has what; a peer that does not answer is left out."""
        wanted = {task.piece.sha256 for task in self._tasks}
        self._holders = {digest: [] for digest in wanted}
        unreachable: list[NetworkError] = []
        for source in self._sources:
            try:
                for digest in source.holds(wanted) & wanted:
                    self._holders[digest].append(source)
            except NetworkError as error:
                unreachable.append(error)
        for task in self._tasks:
            if not self._holders[task.piece.sha256]:
                if unreachable:
                    raise unreachable[0]
                raise corrupt("no source has a piece", task.piece.name, expected=task.piece.sha256, actual="nothing",
                              tensor=task.piece.name)  # fmt: skip

    def _open_files(self) -> None:
        for file in self._stage.files:
            path = self._directory / file.name
            handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
            opened = os.fdopen(handle, "r+b", buffering=0)
            self._files.append(opened)
            if os.fstat(handle).st_size != file.num_bytes:
                opened.truncate(file.num_bytes)

    # -- the readers ------------------------------------------------------------------------------------------------

    def _fetch_all(self, journal: Journal) -> None:
        """Run the readers; the first error stops the others after the read that they are in."""
        with ThreadPoolExecutor(self._options.num_readers, thread_name_prefix="shardwise-fetch") as pool:
            futures = [pool.submit(self._fetch, number, task, journal) for number, task in enumerate(self._tasks)]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                self._stop.set()
                for future in futures:
                    future.cancel()
        _raise_first(futures)

    def _fetch(self, number: int, task: _Task, journal: Journal) -> None:
        """One piece, from the first source whose bytes hash to what they must."""
        state = _PieceState()
        self._resume(task, journal, state)
        if state.done_bytes == task.piece.num_bytes:
            return
        failures: list[ShardwiseError] = []
        for source in self._in_turn(number, task):
            try:
                self._pull(source, task, journal, state)
            except (NetworkError, CorruptWeightsError) as error:
                failures.append(error)
                continue
            if self._stop.is_set():
                return
            if state.sha.hexdigest() == task.piece.sha256:
                return
            failures.append(self._discard(source, task, journal, state))
        raise _worst(failures, task)

    def _in_turn(self, number: int, task: _Task) -> list[PieceSource]:
        """Nearest first; sources of one rank take turns. The whole list twice: a restart may need a source that came early."""
        holders = self._holders[task.piece.sha256]
        out: list[PieceSource] = []
        for rank in sorted({source.rank for source in holders}):
            group = [source for source in holders if source.rank == rank]
            turn = number % len(group)
            out += group[turn:] + group[:turn]
        return out + out

    def _resume(self, task: _Task, journal: Journal, state: _PieceState) -> None:
        """Hash what an earlier try left in the file."""
        claimed = min(journal.done(task.file_index, task.piece_index), task.piece.num_bytes)
        if not claimed:
            return
        with self._file_locks[task.file_index]:
            for block in read_blocks(self._files[task.file_index], task.piece.offset_bytes, claimed):
                state.sha.update(block)
        state.done_bytes = claimed
        if claimed == task.piece.num_bytes and state.sha.hexdigest() != task.piece.sha256:
            journal.note(task.file_index, task.piece_index, 0)
            state.restart()
        with self._report_lock:
            self._report.resumed_bytes += state.done_bytes
        self._meter.add(state.done_bytes)

    def _pull(self, source: PieceSource, task: _Task, journal: Journal, state: _PieceState) -> None:
        """Read on from where the piece is, until it is whole or the transfer stops."""
        piece = task.piece
        while state.done_bytes < piece.num_bytes and not self._stop.is_set():
            size = min(READ_BYTES, piece.num_bytes - state.done_bytes)
            if source.rank == PEER:
                self._limit.take(size)
            data = source.read(piece.sha256, state.done_bytes, size)
            if len(data) != size:
                message = "a source gave another number of bytes"
                raise corrupt(message, source.name, expected=size, actual=len(data), tensor=piece.name)
            self._write(task, piece.offset_bytes + state.done_bytes, data)
            state.sha.update(data)
            state.done_bytes += size
            journal.note(task.file_index, task.piece_index, state.done_bytes)
            self._count(source, piece, size)

    def _write(self, task: _Task, offset: int, data: bytes) -> None:
        file = self._files[task.file_index]
        with self._file_locks[task.file_index]:
            file.seek(offset)
            view = memoryview(data)
            while view:
                view = view[file.write(view) or 0 :]

    def _count(self, source: PieceSource, piece: Piece, size: int) -> None:
        report = self._report
        with self._report_lock:
            report.bytes_by_source[source.name] = report.bytes_by_source.get(source.name, 0) + size
            if source.rank == PEER and piece.kind == "tensor":
                report.peer_weight_bytes += size
            elif source.rank == PEER:
                report.peer_header_bytes += size
        self._meter.add(size)

    def _discard(self, source: PieceSource, task: _Task, journal: Journal, state: _PieceState) -> CorruptWeightsError:
        """The piece is whole and wrong: forget it."""
        error = corrupt("a source's copy of a piece is corrupt", source.name, expected=task.piece.sha256,
                        actual=state.sha.hexdigest(), tensor=task.piece.name)  # fmt: skip
        journal.note(task.file_index, task.piece_index, 0)
        with self._report_lock:
            self._report.discarded_bytes += state.done_bytes
        self._meter.add(-state.done_bytes)
        state.restart()
        return error


class _PieceState:
    """How far a piece is, and the hash so far."""

    def __init__(self) -> None:
        self.sha: Any = hashlib.sha256()
        self.done_bytes = 0

    def restart(self) -> None:
        self.sha = hashlib.sha256()
        self.done_bytes = 0


def _worst(failures: list[ShardwiseError], task: _Task) -> ShardwiseError:
    """Corruption tells more than an absent peer."""
    for error in failures:
        if isinstance(error, CorruptWeightsError):
            return error
    return failures[0] if failures else ConnectFailed("no source", where=task.piece.name)


def _raise_first(futures: Sequence[Future[None]]) -> None:
    for future in futures:
        if not future.cancelled():
            error = future.exception()
            if error is not None:
                raise error
