"""Random access to the bytes of a model file: where headers are read from, never whole files.

A `ByteSource` is a name, a size and `read(offset, length)`. `LocalFile` is the one for disks; `model/hub.py` has the
one that asks a server for ranges. Reading beyond the end, a vanished file or a broken connection is a `ModelError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

from shardwise.errors import MalformedModelError, ModelError

T = TypeVar("T")
R = TypeVar("R")
MAX_REQUESTS = 8  # at once to one server


class ByteSource(Protocol):
    """Bytes with a name. Implementations: `LocalFile`, `hub.RemoteFile`."""

    @property
    def is_remote(self) -> bool:
        """Does each read wait for a server?"""

    @property
    def name(self) -> str:
        """What error messages call it."""

    @property
    def size_bytes(self) -> int:
        """Size of the whole file."""

    def read(self, offset_bytes: int, num_bytes: int) -> bytes:
        """Exactly `num_bytes` from `offset_bytes`; raises `MalformedModelError` where the file ends before."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file on this machine; opened anew for each read, so nothing stays open."""

    is_remote: ClassVar[bool] = False
    path: Path
    size_bytes: int

    @classmethod
    def open(cls, path: str | Path) -> LocalFile:
        """Look at the file; `ModelError` where it is missing, not a regular file or unreadable."""
        path = Path(path)
        try:
            if path.is_dir():
                raise ModelError("this is a folder, not a model file", where=str(path), hint="name the .gguf file in it")
            if not path.is_file():
                raise ModelError("there is no such model file", where=str(path), hint="check the path")
            with path.open("rb"):
                return cls(path, path.stat().st_size)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read the model file: {_reason(error)}", where=str(path)) from error

    @property
    def name(self) -> str:
        return str(self.path)

    def read(self, offset_bytes: int, num_bytes: int) -> bytes:
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(offset_bytes)
                data = _read_exactly(file, num_bytes)
        except (OSError, OverflowError) as error:
            raise ModelError(f"cannot read the model file: {_reason(error)}", where=str(self.path)) from error
        if len(data) != num_bytes:
            message = f"the file ends at byte {offset_bytes + len(data)}, {num_bytes - len(data)} bytes too early"
            raise MalformedModelError(message, where=str(self.path), hint="download it again")
        return data


def for_each(function: Callable[[T], R], items: Sequence[T], *, parallel: bool) -> list[R]:
    """`[function(item) for item in items]`, some at a time where each waits for a server."""
    if not parallel or len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(max_workers=min(MAX_REQUESTS, len(items))) as pool:
        return list(pool.map(function, items))


def _read_exactly(file: object, num_bytes: int) -> bytes:
    """`read` may return less than asked for on raw files."""
    parts: list[bytes] = []
    left = num_bytes
    while left > 0:
        part: bytes = file.read(left)  # type: ignore[attr-defined]
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
