"""Splits a model in place, or not at all; and puts it back together.

Data flow: model + plan -> `resolve` (pure) -> all local tensors (nothing changed yet) -> agreement of all ranks -> swap tensors,
forwards and attributes, which cannot fail. Parameters keep their identity, so optimizers and tied weights stay right.

Promises: an error leaves the model as it was, on every rank. `undo` gives back the original bit for bit.
Fails when: see `refuse`, `resolve`, `agreement`. Called by: users, `loading`, `infer`, `stage`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.errors import ShardwiseError, UsageError
from shardwise.tp.agreement import Facts, agree, digest_plan, digest_weights
from shardwise.tp.attention import AttributeChange
from shardwise.tp.bound import SHARD, BoundShard, TpContext, bound_modules, own_forward_of
from shardwise.tp.collectives import Collectives
from shardwise.tp.compiled import register_move
from shardwise.tp.compression import Compressed
from shardwise.tp.config import TensorParallelConfig, staged_over
from shardwise.tp.handout import hand_out
from shardwise.tp.kernels import forward_for
from shardwise.tp.layout import ZEROS, Partition, ShardLayout
from shardwise.tp.refuse import check_model, guard_against_late_adapters
from shardwise.tp.resolve import ResolvedPlan, resolve_plan

_UNDO = "_tp_undo"


@dataclass
class Undo:
    """What `undo` needs beside the layouts: old attribute values, and the decided plan."""

    resolved: ResolvedPlan
    comm: Collectives
    attributes: list[tuple[nn.Module, str, Any]]


def plan_of(model: nn.Module) -> dict[str, Any]:
    """The plan that a model carries: `tp_plan` / `_tp_plan` (transformers, diffusers), else its config's `base_model_tp_plan`."""
    for name in ("tp_plan", "_tp_plan"):
        plan = getattr(model, name, None)
        if isinstance(plan, Mapping) and plan:
            return dict(plan)
    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if isinstance(plan, Mapping) and plan:
        return dict(plan)
    raise UsageError(
        f"{type(model).__name__} has no tensor-parallel plan",
        hint="pass tp_plan={'layers.*.mlp.up': 'colwise', ...}, or let shardwise.tp.infer_plan find one",
    )


def apply_tensor_parallel(
    model: nn.Module,
    config: TensorParallelConfig,
    tp_plan: Mapping[str, Any] | None = None,
    *,
    strict: bool | None = None,
    source_rank: int | None = None,
) -> nn.Module:
    """Split `model` in place over the ranks of `config`; every rank calls this. Gives the model back.

    tp_plan: globs to styles; None takes the model's own. strict: whether a rule that matches nothing is an error (default:
    for a plan given here, not for the model's own). source_rank: hand out that rank's weights, each rank getting its part
    only; without it every rank cuts its own copy, and differing copies are an error.
    Raises UsageError (a ValueError) and leaves the model untouched on every rank."""
    comm = config.collectives()
    resolved, facts = _decide(model, comm, config, tp_plan, strict, source_rank)
    mixed = agree(comm, facts)
    assert resolved is not None  # agree() raised otherwise
    if mixed:
        comm = staged_over(comm)
    device = config.target_device(comm.rank)
    if source_rank is None:
        tensors = cut_tensors(model, resolved, comm.rank, device)
    else:
        tensors = hand_out(model, resolved, comm, source_rank, device)
    bind(model, resolved, context_for(config, comm, resolved), tensors)
    return model


def _decide(
    model: nn.Module,
    comm: Collectives,
    config: TensorParallelConfig,
    plan: Mapping[str, Any] | None,
    strict: bool | None,
    source_rank: int | None,
) -> tuple[ResolvedPlan | None, Facts]:
    """Everything that may fail on this rank alone."""
    try:
        if source_rank is not None and not 0 <= source_rank < comm.size:
            raise UsageError(f"source_rank {source_rank} is not one of the {comm.size} ranks")
        check_model(model, allow_meta=source_rank is not None and comm.rank != source_rank)
        rules = plan_of(model) if plan is None else plan
        resolved = resolve_plan(model, rules, comm.size, config.shares, strict=plan is not None if strict is None else strict)
    except ShardwiseError as error:
        return None, Facts(error)
    first = next(iter(model.parameters()), None)
    device = str((config.target_device(comm.rank) or (first.device if first is not None else torch.device("cpu"))).type)
    weights = digest_weights(model.named_parameters()) if source_rank is None and comm.size > 1 else 0
    return resolved, Facts(None, digest_plan(resolved), weights, "cpu" if device == "meta" else device)


def context_for(config: TensorParallelConfig, comm: Collectives, resolved: ResolvedPlan) -> TpContext:
    """What the split modules share."""
    inner = comm if config.compression is None else Compressed(comm, config.compression)
    return TpContext(inner, resolved.shares, config.sequence_dim, config.overlap_chunks)


def cut_tensors(model: nn.Module, resolved: ResolvedPlan, rank: int, device: torch.device | None) -> dict[str, torch.Tensor]:
    """This rank's tensors by full name, for everything that changes. One tensor for names that share one."""
    out: dict[str, torch.Tensor] = {}
    done: dict[int, torch.Tensor] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        layout = resolved.layout_of(name, tensor.shape)
        if id(tensor) in done:
            out[name] = done[id(tensor)]
        elif layout.dim is not None:
            local = layout.take(tensor.detach(), rank)
            out[name] = done[id(tensor)] = local if device is None else local.to(device)
        elif device is not None and tensor.device != device:
            out[name] = done[id(tensor)] = tensor.detach().to(device)
    return out


def bind(model: nn.Module, resolved: ResolvedPlan, context: TpContext, tensors: Mapping[str, torch.Tensor]) -> None:
    """Swap tensors, forwards and attributes. Nothing here can refuse."""
    guard_against_late_adapters()
    rank = context.comm.rank
    _swap_tensors(model, tensors, resolved, rank)
    modules = dict(model.named_modules(remove_duplicate=False))
    seen: set[int] = set()
    for path, shard in resolved.shards.items():
        module = modules[path]
        if id(module) in seen:
            continue
        seen.add(id(module))
        function, replaced = own_forward_of(module)
        bound = BoundShard(shard, context, function, replaced)
        _fill_tables(bound, module, modules, rank)
        forward = forward_for(bound, module)
        _sum_partial_grads(bound, module)
        module.__dict__[SHARD] = bound
        if forward is not None:
            module.__dict__["forward"] = forward
    saved = [entry for change in resolved.attributes if (entry := _set_attribute(modules[change.path], change, rank))]
    model.__dict__[_UNDO] = Undo(resolved, context.comm, saved)


def _swap_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor], resolved: ResolvedPlan, rank: int) -> None:
    """Parameters keep their identity (`.data`), unless they come from meta or another kind of device."""
    replacements: dict[int, nn.Parameter] = {}
    for name, local in tensors.items():
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        old = module._parameters.get(own)
        if old is None:
            module._buffers[own] = local
        elif old.device == local.device and old.dtype == local.dtype:
            grad, old.grad = old.grad, None
            layout = resolved.layout_of(name, old.shape)
            if old.data.data_ptr() != local.data_ptr() or old.shape != local.shape:
                old.data = local
            if grad is not None and layout.dim is not None and tuple(grad.shape) == layout.shape:
                old.grad = layout.take(grad, rank)
        else:
            floating = local.is_floating_point() or local.is_complex()
            new = replacements.setdefault(id(old), nn.Parameter(local, requires_grad=old.requires_grad and floating))
            module._parameters[own] = new


def _set_attribute(module: nn.Module, change: AttributeChange, rank: int) -> tuple[nn.Module, str, Any] | None:
    value = change.values[rank]
    if change.name.startswith("config."):
        old = module.config
        own = copy.copy(old)
        setattr(own, change.name.removeprefix("config."), value)
        module.__dict__["config"] = own
        return module, "config", old
    old = getattr(module, change.name)
    setattr(module, change.name, value)
    return module, change.name, old


def _fill_tables(bound: BoundShard, module: nn.Module, modules: Mapping[str, nn.Module], rank: int) -> None:
    """Small lookups that kernels need: global id -> local position, ownership of copied indices, sizes."""
    shard, kernel, comm = bound.shard, bound.shard.style.kernel, bound.comm
    for kind in ("copy", "reduce", "sum_shared"):
        comm.numbers[kind] = register_move(kind, comm)
    if shard.part is not None:
        for kind, wanted in (("split", shard.style.enter), ("gather", shard.style.leave)):
            if wanted == kind:
                bound.numbers[kind] = register_move(kind, comm, shard.part)
    tensor = next((t for t in module.parameters(recurse=False)), None)
    device = tensor.device if tensor is not None else torch.device("cpu")
    if kernel in ("vocab", "moe_expert") and shard.part is not None:
        bound.tables["local_index"] = _local_index(shard.part, rank).to(device)
        bound.numbers["num_local"] = shard.part.local_sizes[rank]
    if kernel == "rms_norm" and shard.part is not None and shard.part.has_copies:
        bound.tables["inverse_copies"] = _inverse_copies(shard.part, rank).to(device)
    if kernel == "mla_kv_a":
        parent = modules[shard.path.rpartition(".")[0]]
        bound.numbers["rope"] = int(getattr(parent, "qk_rope_head_dim", None) or parent.config.qk_rope_head_dim)
    if kernel == "vocab" and getattr(module, "padding_idx", None) is not None and bound.comm.size > 1:
        local = int(bound.tables["local_index"][module.padding_idx])
        bound.numbers["padding_idx"] = module.padding_idx
        module.padding_idx = local if local >= 0 else None


def _local_index(part: Partition, rank: int) -> torch.Tensor:
    table = torch.full((part.size,), -1, dtype=torch.long)
    table[torch.tensor(part.indices(rank), dtype=torch.long)] = torch.arange(part.local_sizes[rank])
    return table


def _inverse_copies(part: Partition, rank: int) -> torch.Tensor:
    copies = torch.zeros(part.size)
    for other in range(part.degree):
        held = torch.tensor([i for i in part.indices(other) if i != ZEROS], dtype=torch.long)
        copies.index_add_(0, held, torch.ones(held.numel()))
    mine = torch.tensor(part.indices(rank), dtype=torch.long)
    return torch.where(mine >= 0, 1.0 / copies[mine.clamp(min=0)], 0.0)


def _sum_partial_grads(bound: BoundShard, module: nn.Module) -> None:
    """Parameters of which each rank sees a part of the gradient: replicated ones inside a split, and copied KV heads.

    The hook runs on each new gradient before it is accumulated, so gradient accumulation stays right."""
    comm = bound.comm
    if comm.size == 1:
        return
    for name, parameter in module.named_parameters(recurse=False):
        layout = bound.shard.layouts.get(name)
        if not parameter.requires_grad:
            continue
        if layout is not None and layout.dim is not None:
            if layout.partition is not None and layout.partition.has_copies:
                bound.hooks.append(parameter.register_hook(_CopiesSum(comm, layout)))
        elif bound.shard.style.sum_grads:
            bound.hooks.append(parameter.register_hook(_GradSum(comm)))


class _GradSum:
    """Gradient hook: the sum over ranks."""

    def __init__(self, comm: Collectives) -> None:
        self.comm = comm

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        return self.comm.all_reduce(grad.clone(memory_format=torch.contiguous_format))


class _CopiesSum:
    """Gradient hook for indices that are held more than once: every copy gets the sum over all copies."""

    def __init__(self, comm: Collectives, layout: ShardLayout) -> None:
        self.comm, self.layout = comm, layout
        part, rank = layout.partition, comm.rank
        self.indices = torch.tensor([i for i in part.indices(rank) if i != ZEROS], dtype=torch.long) if part else None
        self.zeros = bool(part and any(i == ZEROS for i in part.indices(rank)))

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        dim, comm = self.layout.dim or 0, self.comm
        full = grad.new_zeros(self.layout.shape)
        if not self.zeros and self.indices is not None:
            full.index_add_(dim, self.indices.to(grad.device), grad)
        return self.layout.take(comm.all_reduce(full), comm.rank)


def undo(model: nn.Module) -> nn.Module:
    """Put the full tensors, forwards and attributes back, bit for bit; every rank calls this."""
    from shardwise.tp.gather import gather_tensor

    record: Undo | None = model.__dict__.get(_UNDO)
    if record is None:
        raise UsageError(
            "the model is not split", where=type(model).__name__, hint="undo takes the model that apply_tensor_parallel got"
        )
    done: dict[int, torch.Tensor] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        path, _, own = name.rpartition(".")
        shard = record.resolved.shards.get(path)
        layout = shard.layouts.get(own) if shard else None
        if layout is None or layout.dim is None or id(tensor) in done:
            continue
        full = done[id(tensor)] = gather_tensor(tensor.detach(), layout, record.comm)
        tensor.grad = None
        tensor.data = full
    for path, bound in bound_modules(model).items():
        _unbind(model.get_submodule(path), bound)
    for module, attribute, old in reversed(record.attributes):
        if attribute == "config":
            module.__dict__["config"] = old
        else:
            setattr(module, attribute, old)
    del model.__dict__[_UNDO]
    return model


def _unbind(module: nn.Module, bound: BoundShard) -> None:
    for hook in bound.hooks:
        hook.remove()
    if "padding_idx" in bound.numbers:
        module.padding_idx = bound.numbers["padding_idx"]
    module.__dict__.pop("forward", None)
    if bound.replaced is not None:
        module.__dict__["forward"] = bound.replaced
    del module.__dict__[SHARD]


def resolved_of(model: nn.Module) -> ResolvedPlan:
    """The decided plan of a split model."""
    record: Undo | None = model.__dict__.get(_UNDO)
    if record is None:
        raise UsageError("the model is not split", where=type(model).__name__)
    return record.resolved
