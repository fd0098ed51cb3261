"""Reads spans piece by piece, hashes them once, and writes files out of them.

In: `FileLayout`s. Out: `SliceFile`s with digests, and the files themselves where a directory is given; a file appears under
its name only when it is whole and on the disk. Memory: a few blocks of `BLOCK_BYTES`. Fails when: the model's file ends
early or a digest is not the known one (`CorruptWeightsError`), the disk is full or closed to us (`UsageError`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from shardwise.errors import CorruptWeightsError, UsageError
from shardwise.shards.gguf_writer import sync_directory
from shardwise.shards.layout import FileLayout, Span
from shardwise.shards.manifest import Piece, SliceFile, corrupt

BLOCK_BYTES = 2 << 20  # fits a core's cache, so hashing and writing read it from there
OnBytes = Callable[[int], None]
Place = tuple[str, int, int]  # path, offset, size


class SpanHasher:
    """Hashes spans; the bytes of one place are hashed once, however many files hold them."""

    def __init__(self, known: dict[Place, str] | None = None, on_bytes: OnBytes = lambda _: None) -> None:
        self.known: dict[Place, str] = dict(known or {})
        self._on_bytes = on_bytes
        self._files: dict[Path, BinaryIO] = {}

    def hash_file(self, layout: FileLayout) -> SliceFile:
        """Digests only; nothing is written, and places that are known are not read."""
        pieces = []
        for span in layout.spans:
            sha256 = self.known.get(_place(span)) if span.path is not None else None
            pieces.append(piece_of(span, sha256 or self._hash(span, None)))
        return SliceFile(name=layout.name, num_bytes=layout.num_bytes, pieces=tuple(pieces))

    def write_file(self, layout: FileLayout, directory: Path) -> SliceFile:
        """Write the file into `directory`, hashing what is written; a known digest must come out again."""
        path = directory / layout.name
        beside = directory / f".{layout.name}.{secrets.token_hex(4)}.part"
        try:
            with open(beside, "xb", buffering=0) as out:
                out.truncate(layout.num_bytes)
                pieces = []
                for span in layout.spans:
                    out.seek(span.offset_bytes)
                    pieces.append(piece_of(span, self._hash(span, out)))
                os.fsync(out.fileno())
            os.replace(beside, path)
            sync_directory(directory)
        except OSError as error:
            raise cannot_write(path, error) from error
        finally:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
        return SliceFile(name=layout.name, num_bytes=layout.num_bytes, pieces=tuple(pieces))

    def close(self) -> None:
        """Close the model's files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _hash(self, span: Span, out: BinaryIO | None) -> str:
        sha = hashlib.sha256()
        for block in self._blocks(span):
            sha.update(block)
            if out is not None:
                _write_whole(out, block)
            self._on_bytes(len(block))
        found = sha.hexdigest()
        if span.path is not None and self.known.setdefault(_place(span), found) != found:
            where = str(span.path)
            known = self.known[_place(span)]
            raise corrupt("the model's file has changed on the disk", where, expected=known, actual=found, tensor=span.origin)
        return found

    def _blocks(self, span: Span) -> Iterator[bytes | memoryview]:
        if span.path is None:
            yield span.data if span.data is not None else bytes(span.num_bytes)
            return
        file = self._files.get(span.path)
        if file is None:
            file = self._files[span.path] = open_model_file(span.path)
        file.seek(span.source_offset_bytes)
        buffer = memoryview(bytearray(min(BLOCK_BYTES, span.num_bytes)))
        left = span.num_bytes
        while left:
            count = file.readinto(buffer[: min(left, len(buffer))])  # type: ignore[attr-defined]
            if not count:
                raise corrupt("the file ends early", str(span.path), expected=span.num_bytes, actual=span.num_bytes - left,
                              tensor=span.name)  # fmt: skip
            yield buffer[:count]
            left -= count


def open_model_file(path: Path) -> BinaryIO:
    """Open unbuffered; a missing file is a `CorruptWeightsError`."""
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise CorruptWeightsError(
            f"cannot read the file: {error.strerror}", where=str(path), expected="a file", actual=""
        ) from error


def piece_of(span: Span, sha256: str) -> Piece:
    """A span with its digest."""
    return Piece(
        name=span.name,
        kind=span.kind,
        offset_bytes=span.offset_bytes,
        num_bytes=span.num_bytes,
        sha256=sha256,
        dtype=span.dtype,
        shape=span.shape,
        origin=span.origin,
        origin_file=span.origin_file,
        origin_offset_bytes=span.source_offset_bytes if span.origin_file >= 0 else 0,
    )


def cannot_write(path: Path, error: OSError) -> UsageError:
    """A full disk and a closed door, told apart."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "free some space or choose another directory" if full else "choose a directory that you may write"
    return UsageError(f"cannot write: {error.strerror or error}", where=str(path), hint=hint)


def _place(span: Span) -> Place:
    return (str(span.path), span.source_offset_bytes, span.num_bytes)


def _write_whole(out: BinaryIO, block: bytes | memoryview) -> None:
    """An unbuffered write may take less than all."""
    view = memoryview(block)
    while view:
        view = view[out.write(view) or 0 :]
