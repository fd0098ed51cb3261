"""Saves a split model as it is: one safetensors file per rank and one layout file, readable at any other number of ranks.

Data flow: local tensors + `ShardLayout`s -> `tp-rank-RR-of-WW.safetensors` and `tp_layout.json`; `loading.load_sharded` reads the
folder at any W'. No tensor crosses the group. Promises: bit for bit; the layout file appears last, so a folder without it is an
unfinished save. Fails when: the model is not split, the folder cannot be written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.errors import UsageError
from shardwise.tp.apply import resolved_of
from shardwise.tp.bound import bound_modules
from shardwise.tp.gather import gather
from shardwise.tp.sources import LAYOUT_FILE, shard_file


def save_sharded(model: nn.Module, folder: str | Path) -> Path:
    """Every rank writes its file; rank 0 the layout, once all files are there. Gives the folder."""
    from safetensors.torch import save_file

    resolved = resolved_of(model)
    comm = next(iter(bound_modules(model).values())).comm
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    tensors, ties, layouts = _state(model)
    save_file(tensors, str(target / shard_file(comm.rank, comm.size)))
    comm.all_gather(torch.zeros(1, device=comm.device), [1] * comm.size, 0)  # all files are written
    if comm.rank == 0:
        record = {"degree": comm.size, "shares": resolved.shares, "tensors": layouts, "ties": ties}
        partial = target / (LAYOUT_FILE + ".partial")
        partial.write_text(json.dumps(record))
        partial.replace(target / LAYOUT_FILE)
    comm.all_gather(torch.zeros(1, device=comm.device), [1] * comm.size, 0)
    return target


def _state(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, Any]]:
    """(tensors, tied name -> stored name, layouts) of this rank."""
    resolved = resolved_of(model)
    tensors: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    layouts: dict[str, Any] = {}
    seen: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            ties[name] = seen[id(tensor)]
            continue
        seen[id(tensor)] = name
        tensors[name] = tensor.detach().contiguous()
        path, _, own = name.rpartition(".")
        shard = resolved.shards.get(path)
        layout = shard.layouts.get(own) if shard else None
        layouts[name] = layout.as_dict() if layout else {"shape": list(tensor.shape)}
    return tensors, ties, layouts


def save_full(model: nn.Module, path: str | Path) -> Path:
    """The unsharded weights in one safetensors file, gathered on rank 0 only; every rank calls this."""
    from safetensors.torch import save_file

    bound = bound_modules(model)
    if not bound:
        raise UsageError("the model is not split", where=type(model).__name__)
    full = gather(model, rank=0)
    if next(iter(bound.values())).comm.rank == 0:
        unique: dict[int, str] = {}
        kept = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in unique:
                unique[id(tensor)] = name
                kept[name] = full[name].contiguous()
        save_file(kept, str(path))
    return Path(path)
