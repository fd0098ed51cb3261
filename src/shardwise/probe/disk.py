"""Disk read bandwidth where slices lie: what loading costs, and paging when memory is short.

A file is written, pushed out of the page cache where the system allows it (said in the method), and read in order.
**Fails when** the folder cannot be written or is nearly full: then there is no figure, and a note instead.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
from pathlib import Path

from shardwise.clock import Clock
from shardwise.errors import UsageError

_CHUNK_BYTES = 4 * 2**20


def disk_samples(folder: Path, file_bytes: int, rounds: int, clock: Clock) -> tuple[list[float], str]:
    """Bytes per second of each reading of the whole file, and the method."""
    path = folder / f".shardwise-probe-{secrets.token_hex(6)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < 4 * file_bytes:
            raise UsageError("too little space for a disk probe", where=str(folder))
        _write(path, file_bytes)
        samples, uncached = [], True
        for _ in range(rounds):
            uncached = _drop_from_cache(path)
            samples.append(_read(path, file_bytes, clock))
    except OSError as error:
        raise UsageError(f"no disk probe: {error.strerror}", where=str(folder)) from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return samples, f"sequential read of {file_bytes >> 20} MiB, {'not cached' if uncached else 'possibly cached'}"


def _write(path: Path, file_bytes: int) -> None:
    chunk = secrets.token_bytes(_CHUNK_BYTES)  # a disk that compresses shall not shine
    with path.open("wb") as out:
        for _ in range(file_bytes // _CHUNK_BYTES):
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())


def _drop_from_cache(path: Path) -> bool:
    if not hasattr(os, "posix_fadvise"):
        return False
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
    return True


def _read(path: Path, file_bytes: int, clock: Clock) -> float:
    buffer = bytearray(_CHUNK_BYTES)
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(handle, fcntl.F_NOCACHE, 1)
        with os.fdopen(os.dup(handle), "rb", buffering=0) as source:
            started_s = clock.now_s()
            while source.readinto(buffer):
                pass
            return file_bytes / (clock.now_s() - started_s)
    finally:
        os.close(handle)
