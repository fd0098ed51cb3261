"""OVER WHAT the model is split: profiles of nodes and links, as data."""

from shardwise.machines.profile import ClusterProfile, DeviceProfile, LinkProfile, Measurement, NodeProfile

__all__ = ["ClusterProfile", "DeviceProfile", "LinkProfile", "Measurement", "NodeProfile"]
