"""Compares a split model with the unsharded one: outputs, gradients, parameters after a step, gathered weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.tp import TensorParallelConfig, apply_tensor_parallel, gather, resolved_of, undo
from shardwise.tp.bound import bound_modules

Run = Callable[[nn.Module], torch.Tensor]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference over the largest magnitude (at least 1)."""
    if a.numel() == 0:
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1.0))


def full_grads(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients in full: put in place of the parameters, then gathered."""
    from shardwise.tp.gather import gather_tensor

    resolved = resolved_of(model)
    comm = next(iter(bound_modules(model).values())).comm
    out = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        path, _, own = name.rpartition(".")
        shard = resolved.shards.get(path)
        layout = shard.layouts.get(own) if shard else None
        out[name] = grad if layout is None else gather_tensor(grad, layout, comm)
    return out


def compare(
    model: nn.Module,
    plan: Mapping[str, Any] | None,
    run: Run,
    *,
    config: TensorParallelConfig,
    train: bool = True,
    source_rank: int | None = None,
) -> dict[str, Any]:
    """Relative errors of forward, gradients and one SGD step; whether gather and undo are exact; collectives counted."""
    split = apply_tensor_parallel(copy.deepcopy(model), config, plan, source_rank=source_rank)
    comm = next(iter(bound_modules(split).values())).comm
    out: dict[str, Any] = {}
    comm.stats.clear()
    with torch.no_grad():
        want, got = run(model), run(split)
    out["forward"], out["calls"] = relative(got, want), dict(comm.stats.calls)
    gathered, original = gather(split), model.state_dict()
    out["gather_exact"] = set(gathered) == set(original) and all(same_bits(gathered[k], original[k]) for k in original)
    if train:
        out |= _train(model, split, run)
    else:
        undo(split)
        out["undo_exact"] = all(same_bits(a, original[k]) for k, a in split.state_dict().items())
        with torch.no_grad():
            out["undo_forward_exact"] = same_bits(run(split), want)
    return out


def _train(model: nn.Module, split: nn.Module, run: Run) -> dict[str, float]:
    """Two backward passes that accumulate, then a step: what a wrong gradient sum would spoil."""
    whole = copy.deepcopy(model)
    torch.manual_seed(7)
    for _ in range(2):
        for one in (whole, split):
            y = run(one)
            weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
            (y * weights).sum().backward()
    grads = full_grads(split)
    wanted = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in whole.named_parameters()}
    worst = max((relative(grads[n], wanted[n]), n) for n in wanted)
    for one in (whole, split):
        torch.optim.SGD(one.parameters(), lr=0.01).step()
    stepped, target = gather(split), whole.state_dict()
    return {"grads": worst[0], "worst_grad": worst[1], "step": max(relative(stepped[k], target[k]) for k in target)}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
    )
