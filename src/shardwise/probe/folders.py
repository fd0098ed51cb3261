"""Where a machine keeps what it measured: each its own, whoever asked for the measurement."""

from __future__ import annotations

import os
from pathlib import Path

OWN_FOLDER = "own"  # in settings that travel: the cache folder of the machine that measures, not of the one that asks


def cache_folder() -> Path:
    """`SHARDWISE_CACHE`, or `shardwise` in the user's cache folder: the same place where slices lie."""
    if own := os.environ.get("SHARDWISE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise"


def resolved(folder: str, below: str = "") -> Path:
    """A folder of the settings as a path here."""
    return cache_folder() / below if folder == OWN_FOLDER else Path(folder or ".")
