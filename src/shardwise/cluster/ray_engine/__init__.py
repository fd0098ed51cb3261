"""Ray as the engine for many machines: placement, liveness and logs by Ray; activations never pass through it."""

from shardwise.cluster.ray_engine.engine import RayEngine
from shardwise.cluster.ray_engine.settings import RayAddress, RaySecurity

__all__ = ["RayAddress", "RayEngine", "RaySecurity"]
