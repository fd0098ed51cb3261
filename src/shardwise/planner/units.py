"""Where a stage can run: every device of every machine, and the processor of machines that have accelerators.

In: a cluster. Out: `Unit`s in the order of the file. Nothing here fails.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.machines.profile import ClusterProfile, DeviceProfile, NodeProfile


@dataclass(frozen=True, slots=True)
class Unit:
    """One device of one machine, a place for one rank."""

    node: NodeProfile
    device: DeviceProfile
    device_name: str  # unique within the node

    @property
    def key(self) -> tuple[str, str]:
        return (self.node.name, self.device_name)


def _cpu_of(node: NodeProfile) -> DeviceProfile:
    return DeviceProfile(
        kind="cpu",
        name="cpu",
        memory_bytes=node.memory_bytes,
        memory_bytes_per_s=node.memory_bytes_per_s,
        compute_flops_per_s=node.compute_flops_per_s,
        rates=node.rates,
    )


def node_units(node: NodeProfile) -> list[Unit]:
    """The devices of a node. The CPU counts too, except beside a GPU that shares its memory (Metal) or a listed CPU."""
    out: list[Unit] = []
    for index, device in enumerate(node.devices):
        same = sum(1 for d in node.devices if d.kind == device.kind)
        default = device.kind if same == 1 else f"{device.kind}{index}"
        names = [d.name for d in node.devices]
        name = device.name if device.name and names.count(device.name) == 1 else default
        out.append(Unit(node, device, name))
    if not any(d.kind in ("metal", "cpu") for d in node.devices) and node.memory_bytes > 0:
        out.append(Unit(node, _cpu_of(node), "cpu"))
    return out


def cluster_units(cluster: ClusterProfile) -> list[Unit]:
    """All units of all nodes."""
    return [unit for node in cluster.nodes for unit in node_units(node)]
