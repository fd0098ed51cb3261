"""OVER WHAT the model is split: profiles of nodes and links, as data; reading and writing the cluster file."""

from shardwise.machines.cluster_file import load_cluster, parse_cluster, write_cluster
from shardwise.machines.profile import (
    ClusterProfile,
    DeviceProfile,
    LayerTiming,
    LinkProfile,
    Measurement,
    NodeProfile,
    RateTable,
)
from shardwise.machines.profile_cache import ProfileCache, RateKey

__all__ = [
    "ClusterProfile",
    "DeviceProfile",
    "LayerTiming",
    "LinkProfile",
    "Measurement",
    "NodeProfile",
    "ProfileCache",
    "RateKey",
    "RateTable",
    "load_cluster",
    "parse_cluster",
    "write_cluster",
]
