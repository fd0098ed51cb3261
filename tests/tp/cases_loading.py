"""Loading slices, handing out weights, saving and re-sharding; on every rank of a group."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.tp import (
    TensorParallelConfig,
    apply_tensor_parallel,
    empty_model,
    gather,
    load_sharded,
    resolved_of,
    save_full,
    save_sharded,
)
from shardwise.tp.bound import bound_modules
from tests.tp.cases_models import language_model
from tests.tp.memory import peak_anonymous
from tests.tp.parity import relative, same_bits

PACKED_PLAN = {
    "blocks.*.gate_up": "packed_colwise",
    "blocks.*.down": "rowwise",
    "blocks.*.q": "colwise",
    "blocks.*.o": "rowwise",
    "embed": "embedding_rowwise",
}


class Block(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(2 * width, width, bias=bias)
        self.q = nn.Linear(width, width, bias=bias)
        self.o = nn.Linear(width, width, bias=bias)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        x = x + self.down(torch.nn.functional.silu(gate) * up)
        return x + self.o(torch.tanh(self.q(x)))


class Stack(nn.Module):
    """Blocks with packed and plain projections; a computed buffer that no file has."""

    def __init__(self, width: int = 48, depth: int = 2, vocab: int = 61, bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, bias) for _ in range(depth))
        self.register_buffer("positions", torch.arange(64).float() / 64, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.positions[: ids.shape[1], None]
        for block in self.blocks:
            x = block(x)
        return x


def build(**sizes: Any) -> Stack:
    torch.manual_seed(21)
    return Stack(**sizes)


def save(rank: int, world: int, *, folder: str, shares: list[float] | None, full: bool) -> dict[str, Any]:
    model = build()
    apply_tensor_parallel(model, TensorParallelConfig(tp_degree=world, shares=shares), PACKED_PLAN)
    save_full(model, Path(folder, "model.safetensors")) if full else save_sharded(model, folder)
    return {}


def load(rank: int, world: int, *, folder: str, shares: list[float] | None, mapped: bool = False) -> dict[str, Any]:
    """Load at another number of ranks; the gathered weights are those of the original, bit for bit."""
    model = empty_model(Stack)
    assert model.blocks[0].down.weight.is_meta
    assert not model.positions.is_meta
    load_sharded(model, folder, TensorParallelConfig(tp_degree=world, shares=shares), PACKED_PLAN, mapped=mapped)
    full, original = gather(model), build()
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        forward = relative(model(ids), original(ids))
    return {"exact": all(same_bits(full[name], tensor) for name, tensor in original.state_dict().items()), "forward": forward}


def memory(
    rank: int, world: int, *, folder: str, shares: list[float] | None, dtype: str, width: int, depth: int
) -> dict[str, Any]:
    """Peak anonymous memory of a load, beside what the promise allows."""
    model = empty_model(lambda: Stack(width=width, depth=depth, bias=False))
    warm = empty_model(lambda: nn.ModuleList([nn.Linear(8, 8)]))
    del warm
    gc.collect()
    samples: list[int] = []
    with peak_anonymous(samples):
        load_sharded(
            model,
            folder,
            TensorParallelConfig(tp_degree=world, shares=shares),
            PACKED_PLAN,
            dtype=getattr(torch, dtype),
            strict=False,
        )
    resolved = resolved_of(model)
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    stored = torch.float32.itemsize
    slices = [
        stored * layout.local_numel(rank) // max(1, len(layout.partition.parts[rank]) if layout.partition else 1)
        for shard in resolved.shards.values()
        for layout in shard.layouts.values()
    ]
    whole = sum(
        layout.local_numel(0) * 0 + torch.Size(layout.shape).numel()
        for s in resolved.shards.values()
        for layout in s.layouts.values()
    )
    return {"peak": samples[0], "own": own, "slice": max(slices), "full": whole * stored}


def hand_out(rank: int, world: int, *, shares: list[float] | None) -> dict[str, Any]:
    """Rank 0's weights reach everybody, each its part only; the other ranks start from meta."""
    torch.manual_seed(21 if rank == 0 else 99)
    model = Stack() if rank == 0 else empty_model(Stack)
    config = TensorParallelConfig(tp_degree=world, shares=shares)
    comm = config.collectives()
    config.group = comm
    apply_tensor_parallel(model, config, PACKED_PLAN, source_rank=0)
    bound = next(iter(bound_modules(model).values()))
    sent = dict(bound.comm.stats.sent_bytes)
    full = gather(model)
    exact = all(same_bits(full[name], tensor) for name, tensor in build().state_dict().items())
    split = sum(
        p.numel() * 4 for name, p in model.named_parameters() if resolved_of(model).layout_of(name, p.shape).dim is not None
    )
    return {"exact": exact, "send": sent.get("send", 0), "broadcast": sent.get("broadcast", 0), "own_split": split}


def language_folder(rank: int, world: int, *, folder: str, name: str, shares: list[float] | None) -> dict[str, Any]:
    """A transformers model saved in several files, loaded slice by slice with the model's own plan."""
    warnings.simplefilter("ignore")
    whole = language_model(name, 12, 4)
    if rank == 0:
        whole.save_pretrained(folder, max_shard_size="60KB")
    torch.distributed.barrier()
    model = empty_model(lambda: type(whole)(whole.config)).eval()
    model.tie_weights()
    load_sharded(model, folder, TensorParallelConfig(tp_degree=world, shares=shares))
    ids = torch.arange(3, 15).view(2, 6)
    with torch.inference_mode():
        out = {"logits": relative(model(ids).logits, whole(ids).logits), "files": len(list(Path(folder).glob("*.safetensors")))}
    full = gather(model)
    out["exact"] = all(same_bits(full[key], tensor) for key, tensor in whole.state_dict().items())
    return out
