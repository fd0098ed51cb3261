"""plan -> verified slices -> running stages -> ready; the only place that joins the rooms.

Names are imported when they are first used: `launch_local` starts the workers' processes before it loads the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.deploy.deployment import Deployment, StageStatus
    from shardwise.deploy.launcher import launch, launch_local
    from shardwise.deploy.options import Placement, RunOptions

_HOMES = {
    "Deployment": "deployment",
    "Placement": "options",
    "RunOptions": "options",
    "StageStatus": "deployment",
    "launch": "launcher",
    "launch_local": "launcher",
}

__all__ = ["Deployment", "Placement", "RunOptions", "StageStatus", "launch", "launch_local"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise.deploy' has no attribute '{name}'")
    return getattr(importlib.import_module(f"shardwise.deploy.{_HOMES[name]}"), name)
