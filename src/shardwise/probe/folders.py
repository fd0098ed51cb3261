"""Where a machine keeps what it measured: each its own, whoever asked for the measurement."""

from __future__ import annotations

from pathlib import Path

from shardwise.shards.cache_folder import default_cache

OWN_FOLDER = "own"  # in settings that travel: the cache folder of the machine that measures, not of the one that asks


def resolved(folder: str, below: str = "") -> Path:
    """A folder of the settings as a path here."""
    return default_cache() / below if folder == OWN_FOLDER else Path(folder or ".")
