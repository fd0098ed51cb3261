"""THE MACHINES, alive: engines that place and watch workers, membership, discovery, pairing, reconcile.

Names are imported when they are first used: a worker process runs `cluster.child` before anything else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.cluster.engine import ClusterEngine, NodeInfo, WorkerSpec, WorkerStatus
    from shardwise.cluster.fake import FakeEngine
    from shardwise.cluster.local import LocalEngine

_HOMES = {
    "ClusterEngine": "engine",
    "FakeEngine": "fake",
    "LocalEngine": "local",
    "NodeInfo": "engine",
    "WorkerSpec": "engine",
    "WorkerStatus": "engine",
}

__all__ = ["ClusterEngine", "FakeEngine", "LocalEngine", "NodeInfo", "WorkerSpec", "WorkerStatus"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise.cluster' has no attribute '{name}'")
    return getattr(importlib.import_module(f"shardwise.cluster.{_HOMES[name]}"), name)
