"""The full tensors back from all ranks, bit for bit: bytes travel, no value passes through arithmetic.

Fails when: a rank is gone. Every rank must call `gather` together.
"""

from __future__ import annotations

import torch
from torch import nn

from shardwise.errors import UsageError
from shardwise.tp.bound import bound_modules
from shardwise.tp.collectives import Collectives
from shardwise.tp.layout import ShardLayout


def gather_tensor(local: torch.Tensor, layout: ShardLayout, comm: Collectives) -> torch.Tensor:
    """One tensor in full, on every rank."""
    if layout.dim is None or layout.partition is None:
        return local.clone()
    parts = comm.gather_bytes(local, layout.partition.local_sizes, layout.dim)
    return layout.assemble(parts)


def gather_tensor_to(local: torch.Tensor, layout: ShardLayout, comm: Collectives, rank: int) -> torch.Tensor | None:
    """One tensor in full on `rank`, None elsewhere: the others never hold it."""
    if layout.dim is None or layout.partition is None or comm.size == 1:
        return local.clone() if comm.rank == rank else None
    if comm.rank != rank:
        flat = local.contiguous().view(-1)
        comm.send(flat.view(torch.uint8) if flat.numel() else flat, rank)
        return None
    full = torch.empty(layout.shape, dtype=local.dtype, device=local.device)
    for other in range(comm.size - 1, -1, -1):
        part = local.contiguous()
        if other != rank:
            part = torch.empty(layout.local_shape(other), dtype=local.dtype, device=local.device)
            comm.receive(part.view(-1).view(torch.uint8) if part.numel() else part, other)
        layout.put(full, part, other)
    return full


def gather(module: nn.Module, *, rank: int | None = None) -> dict[str, torch.Tensor]:
    """The unsharded state dict of a split model (or of a part of one): on every rank, or on `rank` only ({} elsewhere).

    Bit for bit what was split: packed and uneven layouts are put back in their original order."""
    bound = bound_modules(module)
    if not bound:
        raise UsageError("the module is not split", where=type(module).__name__, hint="use state_dict()")
    comm = next(iter(bound.values())).comm
    if rank is not None and not 0 <= rank < comm.size:
        raise UsageError(f"rank {rank} is not one of the {comm.size} ranks")
    out: dict[str, torch.Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        path, _, own = name.rpartition(".")
        holder = bound.get(path)
        layout = (holder.shard.layouts.get(own) if holder else None) or ShardLayout(tuple(tensor.shape))
        if rank is None:
            out[name] = gather_tensor(tensor.detach(), layout, comm)
        elif (full := gather_tensor_to(tensor.detach(), layout, comm, rank)) is not None:
            out[name] = full
    return out
