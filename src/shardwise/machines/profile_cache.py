"""A versioned cache of measured rates, so that a second probe of the same thing is free.

A rate belongs to what it depends on: device, quantization (dtype), kernel build and library version. A change of any of
these, or of this file's format, is another key; nothing stale is ever returned. One JSON file an entry, written at once
(rename). Fails when the folder cannot be written (`UsageError`); an unreadable entry counts as absent.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.errors import UsageError
from shardwise.machines.profile import RateTable
from shardwise.records import Record, digest, from_json, to_json

CACHE_FORMAT = 1


class RateKey(Record):
    """What a measured rate depends on."""

    device: str  # kind, name and what identifies it: "cpu Intel Xeon ... 2 threads"
    quantization: str
    library: str  # with version: "llama.cpp 0.3.36"
    kernel: str = ""  # build: "openblas", "plain avx512", driver version
    format: int = CACHE_FORMAT


class CacheEntry(Record):
    """One file of the cache."""

    key: RateKey
    rates: RateTable


class ProfileCache:
    """Measured `RateTable`s by `RateKey` in one folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def _path(self, key: RateKey) -> Path:
        return self.folder / f"rates-{digest(key)[:32]}.json"

    def get(self, key: RateKey) -> RateTable | None:
        """The rates measured under exactly this key, or None."""
        path = self._path(key)
        try:
            entry = from_json(path.read_bytes(), CacheEntry, where=str(path))
        except (OSError, UsageError):
            return None
        return entry.rates if entry.key == key else None

    def put(self, key: RateKey, rates: RateTable) -> None:
        """Keep `rates`; replaces an older entry of the same key."""
        path = self._path(key)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(to_json(CacheEntry(key=key, rates=rates), indent=1))
            os.replace(partial, path)
        except OSError as error:
            raise UsageError(f"cannot write the profile cache: {error.strerror or error}", where=str(path)) from error
