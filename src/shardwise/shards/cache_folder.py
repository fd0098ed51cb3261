"""Where this machine keeps what can be made or fetched again; apart from what is kept there, which loads much more."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache() -> Path:
    """`SHARDWISE_CACHE`, or `shardwise` in the user's cache folder: for all that can be made or fetched again."""
    if own := os.environ.get("SHARDWISE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise"
