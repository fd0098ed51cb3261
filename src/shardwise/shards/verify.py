"""Finds every bit that is not what the manifest says, and names it: file, tensor, expected, actual.

In: a directory (or one stage's files in it) and a manifest. Out: a list of `Mismatch`, empty when all is well. Reads each byte
once. Nothing is raised for bad content (`UsageError` where there is no folder); `verify_dir` also reports a damaged manifest as
a mismatch. **Called by** `shardwise verify`, the worker before it maps its slice, the store after a transfer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from shardwise.errors import CorruptWeightsError, UsageError
from shardwise.records import Record
from shardwise.shards.manifest import MANIFEST_NAME, SliceFile, StageSlice, corrupt, load_manifest

BLOCK_BYTES = 2 << 20
OnProgress = Callable[[int, int], None]  # (bytes done, bytes in all)


class Mismatch(Record):
    """One thing that is not as it must be."""

    file: str
    tensor: str  # or the part of the header; "" = the file as a whole
    expected: str
    actual: str
    reason: str

    def sentence(self) -> str:
        part = f", {self.tensor}" if self.tensor else ""
        return f"{self.file}{part}: {self.reason}; expected {self.expected}, found {self.actual}"


def verify_dir(directory: str | Path, *, expected: str = "", progress: OnProgress | None = None) -> list[Mismatch]:
    """Check `manifest.json` (against `expected`, or `manifest.sha256`) and every file that it lists.

    `progress(done_bytes, total_bytes)` is called after each block.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UsageError("there is no such folder", where=str(directory), hint="name a folder that 'shardwise pack' wrote")
    try:
        manifest = load_manifest(directory, expected=expected)
    except CorruptWeightsError as error:
        name = Path(error.where).name or MANIFEST_NAME
        found = error.details
        return [
            Mismatch(file=name, tensor="", expected=str(found["expected"]), actual=str(found["actual"]), reason=error.message)
        ]
    files = list({file.name: file for stage in manifest.stages for file in stage.files}.values())
    return verify_files(paths_in(directory, files), files, progress=progress)


def verify_stage(directory: Path, stage: StageSlice, *, progress: OnProgress | None = None) -> list[Mismatch]:
    """Check one stage's files."""
    return verify_files(paths_in(directory, stage.files), stage.files, progress=progress)


def paths_in(directory: Path, files: Iterable[SliceFile]) -> dict[str, Path]:
    """Name -> path of files in one folder."""
    return {file.name: directory / file.name for file in files}


def verify_files(paths: Mapping[str, Path], files: Sequence[SliceFile], *, progress: OnProgress | None = None) -> list[Mismatch]:
    """Check these files; `paths` by their names."""
    total_bytes = sum(file.num_bytes for file in files)
    done_bytes = 0

    def on_bytes(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        if progress is not None:
            progress(done_bytes, total_bytes)

    return [mismatch for file in files for mismatch in verify_file(paths[file.name], file, on_bytes)]


def verify_file(path: Path, file: SliceFile, on_bytes: Callable[[int], None] = lambda _: None) -> list[Mismatch]:
    """Check one file."""
    try:
        with path.open("rb", buffering=0) as source:
            size = path.stat().st_size
            found = list(_pieces(source, file, on_bytes))
    except FileNotFoundError:
        return [_whole(file, f"{file.num_bytes} bytes", "nothing", "the file is missing")]
    except OSError as error:
        return [_whole(file, f"{file.num_bytes} bytes", error.strerror or str(error), "the file cannot be read")]
    if size != file.num_bytes:
        found.insert(0, _whole(file, f"{file.num_bytes} bytes", f"{size} bytes", "the size is wrong"))
    return found


def _whole(file: SliceFile, expected: str, actual: str, reason: str) -> Mismatch:
    return Mismatch(file=file.name, tensor="", expected=expected, actual=actual, reason=reason)


def require_whole(found: list[Mismatch], directory: Path, **details: object) -> None:
    """Raise `CorruptWeightsError` (exit code 4) about the first mismatch, with their number and `details`."""
    if found:
        first = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        error = corrupt(first.sentence() + more, str(directory / first.file), expected=first.expected, actual=first.actual,
                        tensor=first.tensor)  # fmt: skip
        error.details |= {"num_mismatches": len(found), **details}
        raise error


def _pieces(source: BinaryIO, file: SliceFile, on_bytes: Callable[[int], None]) -> Iterator[Mismatch]:
    """Every piece, and the zeros between."""
    position, before = 0, "the beginning"
    for piece in file.pieces:
        yield from _zeros(source, file, position, piece.offset_bytes, before)
        sha, num_bytes = _hash(source, piece.offset_bytes, piece.num_bytes, on_bytes)
        if num_bytes < piece.num_bytes:
            yield Mismatch(file=file.name, tensor=piece.name, expected=f"{piece.num_bytes} bytes", actual=f"{num_bytes} bytes",
                           reason="the file ends early")  # fmt: skip
        elif sha != piece.sha256:
            yield Mismatch(file=file.name, tensor=piece.name, expected=piece.sha256, actual=sha, reason="the SHA-256 is wrong")
        position, before = piece.offset_bytes + piece.num_bytes, piece.name
    yield from _zeros(source, file, position, file.num_bytes, before)


def _hash(source: BinaryIO, offset: int, num_bytes: int, on_bytes: Callable[[int], None]) -> tuple[str, int]:
    sha, done = hashlib.sha256(), 0
    for block in read_blocks(source, offset, num_bytes):
        sha.update(block)
        done += len(block)
        on_bytes(len(block))
    return sha.hexdigest(), done


def _zeros(source: BinaryIO, file: SliceFile, start: int, end: int, before: str) -> Iterator[Mismatch]:
    for block in read_blocks(source, start, end - start):
        if bytes(block).strip(b"\0"):
            yield Mismatch(file=file.name, tensor=f"padding after {before}", expected="zeros", actual=bytes(block)[:32].hex(),
                           reason="bytes between tensors are not zero")  # fmt: skip
            return


def read_blocks(source: BinaryIO, offset: int, num_bytes: int) -> Iterator[memoryview]:
    """Up to `num_bytes` from `offset`, block by block; ends where the file ends. A block is valid until the next one."""
    if num_bytes <= 0:
        return
    source.seek(offset)
    buffer = memoryview(bytearray(min(BLOCK_BYTES, num_bytes)))
    while num_bytes:
        count = source.readinto(buffer[: min(num_bytes, len(buffer))])  # type: ignore[attr-defined]
        if not count:
            return
        yield buffer[:count]
        num_bytes -= count
