"""Which ranks split the model, and over what they talk.

Data flow: `TensorParallelConfig` + torch's process group or device mesh -> a `Collectives`.
What can fail, as UsageError: degree below 1 or above the world, no mesh and no process group, a mesh of several axes
without the named one, a device type that is not supported (with the list).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import UsageError
from shardwise.tp.collectives import BACKEND_DEVICES, Collectives, DistCollectives, LoneCollectives, StagedCollectives

SUPPORTED_DEVICES = ("cpu", "cuda", "neuron", "xpu", "mps")
_NEEDS_STAGING = ("mps",)


@dataclass
class TensorParallelConfig:
    """How a model is split over ranks.

    tp_degree: ranks per model; ignored where a mesh is given. With more processes than that, consecutive ones form a group.
    mesh: a torch `DeviceMesh`; of a mesh with several axes (data x tensor x context) the one named `axis` is used.
    shares: capacity of each rank, e.g. [2, 1, 1]; None asks for an even split and refuses what does not divide.
    axis: name of the tensor-parallel mesh axis.
    device: where the local tensors go; None: the mesh's device if it is an accelerator, else where the weights are.
    timeout_s: how long a collective may take; None: the process group's own timeout.
    compression: 'int8' or 'fp8' for the sums in the forward pass (see `compression`, with its error bound); None: exact.
    overlap_chunks: row-split products are computed in that many chunks of rows, sums travelling meanwhile (inference).
    sequence_dim: dimension that the sequence-parallel styles cut.
    group: a ready `Collectives` instead of mesh and degree (ranks as threads, your own transport).
    """

    tp_degree: int = 1
    mesh: Any = None
    shares: Sequence[float] | None = None
    axis: str = "tp"
    device: Any = None
    timeout_s: float | None = None
    compression: str | None = None
    overlap_chunks: int = 1
    sequence_dim: int = 1
    group: Collectives | None = None

    def __post_init__(self) -> None:
        if isinstance(self.tp_degree, bool) or not isinstance(self.tp_degree, int) or self.tp_degree < 1:
            raise UsageError(f"tp_degree = {self.tp_degree!r} is not a whole number >= 1")
        if self.overlap_chunks < 1:
            raise UsageError(f"overlap_chunks = {self.overlap_chunks} is not at least 1")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise UsageError(f"timeout_s = {self.timeout_s} is not positive")
        if self.compression not in (None, "int8", "fp8"):
            raise UsageError(f"compression = {self.compression!r} is unknown", hint="'int8', 'fp8' or None")

    def setup(self, rank: int, world_size: int, device: Any = None, mesh: Any = None) -> None:
        """The entry that diffusers' configs have: hand over the mesh once it exists. `rank` is read from the mesh."""
        if mesh is not None and mesh.size() > world_size:
            raise UsageError(f"tp_degree {mesh.size()} exceeds the world of {world_size} process(es)")
        self.mesh = mesh if mesh is not None else self.mesh
        self.device = device if device is not None else self.device

    def collectives(self) -> Collectives:
        """The way to the other ranks. With several groups in one world all processes must call this together."""
        if self.group is not None:
            return self.group
        if self.mesh is not None:
            return self._from_mesh()
        if self.tp_degree == 1:
            return LoneCollectives()
        if not dist.is_available() or not dist.is_initialized():
            raise UsageError(
                "no mesh is set and torch.distributed is not initialised",
                where=f"tp_degree = {self.tp_degree}",
                hint="call torch.distributed.init_process_group first, or pass a mesh",
            )
        world = dist.get_world_size()
        if self.tp_degree > world:
            raise UsageError(f"tp_degree {self.tp_degree} exceeds the world of {world} process(es)")
        if world % self.tp_degree:
            raise UsageError(f"{world} processes are no whole number of groups of {self.tp_degree}")
        return _over(self._own_group(world), _device_of_backend(dist.get_backend()))

    def _from_mesh(self) -> Collectives:
        mesh = self.mesh
        if mesh.device_type not in SUPPORTED_DEVICES:
            raise UsageError(
                f"tensor parallelism does not support the device type '{mesh.device_type}'",
                hint=f"supported: {', '.join(SUPPORTED_DEVICES)}",
            )
        if mesh.ndim > 1:
            names = mesh.mesh_dim_names or ()
            if self.axis not in names:
                raise UsageError(
                    f"the mesh has no axis '{self.axis}'", hint=f"its axes: {', '.join(names) or 'unnamed'}; pass axis="
                )
            mesh = mesh[self.axis]
        if mesh.size() == 1:
            return LoneCollectives()
        if self.timeout_s is None:
            return _over(mesh.get_group(), mesh.device_type)
        ranks = [int(rank) for rank in mesh.mesh.flatten().tolist()]
        group = dist.new_group(ranks, timeout=timedelta(seconds=self.timeout_s), use_local_synchronization=True)
        return _over(group, mesh.device_type)

    def _own_group(self, world: int) -> Any:
        timeout = None if self.timeout_s is None else timedelta(seconds=self.timeout_s)
        if self.tp_degree == world and timeout is None:
            return dist.group.WORLD
        mine = None
        for first in range(0, world, self.tp_degree):
            ranks = list(range(first, first + self.tp_degree))
            group = dist.new_group(ranks, timeout=timeout)
            mine = group if dist.get_rank() in ranks else mine
        return mine

    def target_device(self, rank: int) -> torch.device | None:
        """Where local tensors go; None leaves them where the weights are."""
        if self.device is not None:
            return torch.device(self.device)
        backend = str(dist.get_backend()) if self.group is None and dist.is_initialized() else "gloo"
        kind = self.mesh.device_type if self.mesh is not None else _device_of_backend(backend)
        if kind == "cpu":
            return None
        if kind == "mps":
            return torch.device("mps")
        module = torch.get_device_module(kind)
        count = int(module.device_count()) or 1
        return torch.device(kind, dist.get_rank() % count if dist.is_initialized() else rank % count)


def _device_of_backend(backend: str) -> str:
    return BACKEND_DEVICES.get(str(backend), "cpu")


def _over(group: Any, device_type: str) -> Collectives:
    """The collectives for a device type: direct, or staged through the CPU where it has no backend."""
    if device_type in _NEEDS_STAGING:
        return StagedCollectives(group)
    return DistCollectives(group)


def staged_over(comm: Collectives) -> Collectives:
    """The same ranks through CPU memory: what a group of different devices falls back to."""
    if not isinstance(comm, DistCollectives) or isinstance(comm, StagedCollectives):
        return comm
    if str(dist.get_backend(comm.group)) == "gloo":
        return StagedCollectives(comm.group)
    ranks = dist.get_process_group_ranks(comm.group)
    return StagedCollectives(dist.new_group(ranks, backend="gloo", use_local_synchronization=True))
