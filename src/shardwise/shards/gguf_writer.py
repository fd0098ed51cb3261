"""Writes a GGUF file from raw metadata entries and tensors that are copied from other files, piece by piece.

In: entries (already encoded), a list of `OutTensor`. Out: a file that appears under its name only when it is complete
and on the disk. Memory: one piece of `COPY_BYTES`. Fails when: the disk is full or the directory cannot be written
(`UsageError`); the half-written file is removed.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.clock import SystemClock
from shardwise.errors import CorruptWeightsError, UsageError
from shardwise.model.gguf_header import FORMATS, GgufType
from shardwise.units import format_bytes

COPY_BYTES = 8 << 20
LEFTOVER_AGE_S = 3600.0
ALIGNMENT_BYTES = 32


@dataclass(frozen=True, slots=True)
class OutTensor:
    """One tensor to write: `path is None` means `num_bytes` zeros."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    num_bytes: int
    path: Path | None
    offset_bytes: int = 0


def encode_raw(key: str, kind: GgufType, raw: bytes) -> bytes:
    """One key/value pair from its value's bytes."""
    return _string(key) + struct.pack("<I", kind) + raw


def encode_entry(key: str, kind: GgufType, value: Any) -> bytes:
    """One key/value pair; a list or tuple becomes an array of `kind`."""
    head = _string(key)
    if isinstance(value, list | tuple):
        head += struct.pack("<IIQ", GgufType.ARRAY, kind, len(value))
        return head + b"".join(_value(kind, item) for item in value)
    return head + struct.pack("<I", kind) + _value(kind, value)


def _value(kind: GgufType, value: Any) -> bytes:
    return _string(value) if kind == GgufType.STRING else struct.pack("<" + FORMATS[kind], value)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def encode_header(entries: Iterable[bytes], tensors: Sequence[OutTensor]) -> bytes:
    """Everything before the first tensor's bytes, padded."""
    pairs = list(entries)
    out = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(pairs)), *pairs]
    offset = 0
    for tensor in tensors:
        out.append(_string(tensor.name))
        out.append(struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape))
        out.append(struct.pack("<IQ", tensor.type_id, offset))
        offset += padded(tensor.num_bytes)
    data = b"".join(out)
    return data + bytes(padded(len(data)) - len(data))


def padded(num_bytes: int) -> int:
    """Rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def file_bytes(header: bytes, tensors: Sequence[OutTensor]) -> int:
    """The size of the finished file."""
    return len(header) + sum(padded(t.num_bytes) for t in tensors)


def require_space(directory: Path, needed_bytes: int) -> None:
    """`UsageError` with both figures if the file system of `directory` has less than `needed_bytes` free."""
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise UsageError(
            f"not enough disk space: {needed_bytes} bytes ({format_bytes(needed_bytes)}) needed, "
            f"{free_bytes} bytes ({format_bytes(free_bytes)}) free",
            where=str(directory),
            hint="free some space or choose another directory",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )


def make_directory(directory: Path) -> None:
    """Create it; `UsageError` if it cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(directory, error) from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise _cannot_write(directory, PermissionError(errno.EACCES, "not writable"))


def write_file(path: Path, header: bytes, tensors: Sequence[OutTensor], on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """Write, fsync, rename into place; returns the SHA-256 of the whole file. `on_bytes(n)` after each piece."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    _remove_leftovers(path)
    try:
        digest = _write_all(temporary, header, tensors, on_bytes)
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return digest


def _remove_leftovers(path: Path) -> None:
    """Half-written files of processes that were killed: not those of live ones, nor young ones (of another machine)."""
    import psutil  # here: it takes 10 ms to load, and seldom is there anything to write

    now_s = SystemClock().wall_s()
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        pid = leftover.name.split(".")[-3]
        with contextlib.suppress(OSError):
            old = now_s - leftover.stat().st_mtime > LEFTOVER_AGE_S
            if old and pid.isdecimal() and not psutil.pid_exists(int(pid)):
                leftover.unlink()


def _write_all(path: Path, header: bytes, tensors: Sequence[OutTensor], on_bytes: Callable[[int], None]) -> str:
    sha = hashlib.sha256()

    def emit(data: bytes) -> None:
        out.write(data)
        sha.update(data)
        on_bytes(len(data))

    with open(path, "xb") as out, contextlib.ExitStack() as stack:
        emit(header)
        sources: dict[Path, BinaryIO] = {}
        for tensor in tensors:
            if tensor.path is not None and tensor.path not in sources:
                sources[tensor.path] = stack.enter_context(open(tensor.path, "rb"))
            _copy(tensor, None if tensor.path is None else sources[tensor.path], emit)
            emit(bytes(padded(tensor.num_bytes) - tensor.num_bytes))
        out.flush()
        os.fsync(out.fileno())
    return sha.hexdigest()


def _copy(tensor: OutTensor, source: BinaryIO | None, emit: Callable[[bytes], None]) -> None:
    if source is not None:
        source.seek(tensor.offset_bytes)
    left = tensor.num_bytes
    while left:
        size = min(left, COPY_BYTES)
        data = bytes(size) if source is None else source.read(size)
        if len(data) != size:
            raise CorruptWeightsError(
                f"'{tensor.name}' ends early", where=str(tensor.path), expected=tensor.num_bytes, actual=tensor.num_bytes - left
            )
        emit(data)
        left -= size


def sync_directory(directory: Path) -> None:
    """Make a rename durable, where the system can (not on Windows)."""
    if os.name == "nt":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cannot_write(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write: {error.strerror or error}", where=str(path), hint="choose a directory with space that you may write"
    )
