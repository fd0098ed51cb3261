"""THE MACHINES, alive: engines that place and watch workers, membership, discovery, pairing, reconcile."""

from shardwise.cluster.engine import ClusterEngine, NodeInfo, WorkerSpec, WorkerStatus
from shardwise.cluster.fake import FakeEngine
from shardwise.cluster.local import LocalEngine

__all__ = ["ClusterEngine", "FakeEngine", "LocalEngine", "NodeInfo", "WorkerSpec", "WorkerStatus"]
