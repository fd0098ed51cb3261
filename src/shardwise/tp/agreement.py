"""All ranks agree before any of them changes its model: one small all-gather of facts, and of an error text where one failed.

Promises: either every rank goes on, or every rank raises; with the same plan, the same weights (by samples) and the same
kind of device, or staged. Fails when: a rank refused (its own error there, `UsageError` naming that rank elsewhere), plans
or weights differ, a rank is gone (`collectives`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from shardwise.errors import ShardwiseError, UsageError
from shardwise.tp.collectives import Collectives
from shardwise.tp.resolve import ResolvedPlan

_DEVICE_CODES = {"cpu": 0, "cuda": 1, "neuron": 2, "xpu": 3, "mps": 4, "meta": 5}


@dataclass(frozen=True)
class Facts:
    """What one rank knows: its error, and digests of its plan and weights."""

    error: ShardwiseError | None
    plan: int = 0
    weights: int = 0
    device: str = "cpu"


def digest_plan(resolved: ResolvedPlan) -> int:
    """63 bits over everything that the plan decided."""
    content = [
        (path, shard.style.name, {name: layout.as_dict() for name, layout in shard.layouts.items()})
        for path, shard in sorted(resolved.shards.items())
    ]
    return _digest(json.dumps(content, sort_keys=True).encode())


def digest_weights(named: Iterable[tuple[str, torch.Tensor]]) -> int:
    """63 bits over names, shapes, types and up to 16 values of each tensor, spread over it."""
    state = hashlib.blake2b(digest_size=8)
    for name, tensor in named:
        state.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        if tensor.numel() and not tensor.is_meta and not tensor.is_quantized:
            flat = tensor.detach().reshape(-1)
            step = max(1, flat.numel() // 16)
            state.update(flat[::step][:16].contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(state.digest(), "big") >> 1


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1


def agree(comm: Collectives, facts: Facts) -> bool:
    """Compare all ranks' facts; True where their devices differ (go through the CPU). Raises as the module says."""
    if comm.size == 1:
        if facts.error is not None:
            raise facts.error
        return False
    mine = torch.tensor(
        [[facts.error is not None, facts.plan, facts.weights, _DEVICE_CODES.get(facts.device, 9)]], dtype=torch.int64
    )
    rows = torch.cat(comm.all_gather(mine.to(comm.device), [1] * comm.size, 0)).cpu()
    failed = rows[:, 0].nonzero().flatten().tolist()
    if failed:
        text = _texts(comm, str(facts.error) if facts.error else "")
        if facts.error is not None:
            raise facts.error
        raise UsageError(f"rank {failed[0]} refused: {text[failed[0]]}", where=f"rank {comm.rank}")
    if len(set(rows[:, 1].tolist())) > 1:
        raise UsageError("the ranks were given different plans, shares or models", hint="call with the same arguments everywhere")
    if len(set(rows[:, 2].tolist())) > 1:
        raise UsageError(
            "the ranks hold different weights",
            hint="load the same checkpoint or seed alike everywhere, or pass source_rank=0 to hand out rank 0's weights",
        )
    return len(set(rows[:, 3].tolist())) > 1


def _texts(comm: Collectives, text: str) -> list[str]:
    """Everybody's text."""
    raw = torch.tensor(list(text.encode()[:2000]), dtype=torch.uint8, device=comm.device)
    length = torch.tensor([raw.numel()], device=comm.device)
    sizes = [int(n) for n in torch.cat(comm.all_gather(length, [1] * comm.size, 0)).tolist()]
    return [bytes(part.tolist()).decode(errors="replace") for part in comm.all_gather(raw, sizes, 0)]
