"""Hands out one rank's weights: every other rank gets exactly its part, over the collectives, nothing more.

Promises: no full tensor that is split ever leaves the source. Memory elsewhere: the own part and, for tensors that every rank
holds whole, the tensor. Fails when: a rank is gone. Called by: `apply`.
"""

from __future__ import annotations

import torch
from torch import nn

from shardwise.tp.collectives import Collectives
from shardwise.tp.layout import ShardLayout
from shardwise.tp.resolve import ResolvedPlan


def hand_out(
    model: nn.Module, resolved: ResolvedPlan, comm: Collectives, source: int, device: torch.device | None
) -> dict[str, torch.Tensor]:
    """Every tensor of the model by full name, as this rank holds it."""
    out: dict[str, torch.Tensor] = {}
    done: dict[int, torch.Tensor] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        if id(tensor) not in done:
            layout = resolved.layout_of(name, tensor.shape)
            local = _receive(tensor.detach(), layout, comm, source)
            done[id(tensor)] = local if device is None else local.to(device)
        out[name] = done[id(tensor)]
    return out


def _receive(full: torch.Tensor, layout: ShardLayout, comm: Collectives, source: int) -> torch.Tensor:
    if layout.dim is None:
        empty = torch.empty(layout.shape, dtype=full.dtype, device=comm.device)
        whole = full.contiguous().to(comm.device, copy=True) if comm.rank == source else empty
        raw = whole.view(-1).view(torch.uint8) if whole.numel() and whole.dim() else whole.view(-1)
        comm.broadcast(raw, source)
        return whole
    mine = torch.empty(layout.local_shape(comm.rank), dtype=full.dtype, device=comm.device)
    for rank in range(comm.size):
        if rank == source:
            mine = layout.take(full, rank).to(comm.device) if comm.rank == source else mine
        elif comm.rank == source:
            part = layout.take(full, rank).to(comm.device)
            comm.send(part.view(-1).view(torch.uint8) if part.numel() else part, rank)
        elif comm.rank == rank:
            comm.receive(mine.view(-1).view(torch.uint8) if mine.numel() else mine, source)
    return mine
