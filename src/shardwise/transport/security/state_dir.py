"""Where a machine keeps its keys, for every room that needs them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shardwise.errors import UsageError
from shardwise.transport.security.keys import NodeKeys


def state_dir() -> Path:
    """`SHARDWISE_STATE`, or `shardwise` in the user's state folder; whether it exists or not."""
    if own := os.environ.get("SHARDWISE_STATE"):
        return Path(own)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "shardwise"
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "shardwise"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "shardwise"


def own_keys() -> NodeKeys:
    """This machine's key pair, made on first use; `UsageError` that names the folder where it cannot be kept."""
    folder = state_dir()
    try:
        return NodeKeys.load_or_make(folder / "node.key")
    except (OSError, UsageError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        raise unusable(folder, cause) from error


def unusable(folder: Path, error: OSError) -> UsageError:
    """A state folder that cannot be made, read or written."""
    return UsageError(
        f"cannot use this machine's state folder: {error.strerror or error}",
        where=str(folder),
        hint="set SHARDWISE_STATE to a folder that you may write",
    )
