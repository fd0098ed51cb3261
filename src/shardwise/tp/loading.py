"""Loads a model split from the start: each rank reads its slices only, through a model whose parameters are on meta.

Data flow: `empty_model(factory)` builds the modules without weights; `load_sharded` resolves the plan on shapes, checks that the
source has every tensor in the right shape, then for each tensor: read one piece, cast it into its place, let it go.

Promises: peak anonymous memory stays near own share + replicated tensors + one piece; a failure leaves the model as it was.
Fails when: the source lacks a tensor (named) or has another shape, plus whatever `apply` can fail with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.errors import ShardwiseError, UsageError
from shardwise.tp.agreement import Facts, agree, digest_plan
from shardwise.tp.apply import bind, context_for, plan_of
from shardwise.tp.config import TensorParallelConfig, staged_over
from shardwise.tp.refuse import check_model
from shardwise.tp.resolve import ResolvedPlan, resolve_plan
from shardwise.tp.sources import LAYOUT_FILE, SafetensorsSource, ShardedSource, WeightSource

Model = TypeVar("Model", bound=nn.Module)


class _EmptyOnMeta(TorchFunctionMode):
    """`torch.empty` (what weights are made with) gives meta tensors; small computed buffers (arange, ones) stay real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and "out" not in kwargs:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def empty_model(factory: Callable[[], Model]) -> Model:
    """Build a model without allocating its weights: `empty_model(lambda: MyModel(config))`."""
    with _EmptyOnMeta(), torch.no_grad():
        return factory()


def open_source(where: WeightSource | str | Path | list[str | Path]) -> WeightSource:
    """A folder that `save_sharded` wrote, a folder of safetensors, or files."""
    if isinstance(where, str | Path):
        return ShardedSource(where) if (Path(where) / LAYOUT_FILE).exists() else SafetensorsSource(where)
    return SafetensorsSource(where) if isinstance(where, list | tuple) else where


def load_sharded(
    model: nn.Module,
    source: WeightSource | str | Path | list[str | Path],
    config: TensorParallelConfig,
    tp_plan: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    rename: Callable[[str], str] | None = None,
    strict: bool | None = None,
    mapped: bool = False,
) -> nn.Module:
    """Split `model` (on meta, see `empty_model`) and fill it with this rank's slices; every rank calls this.

    dtype: cast floating-point tensors to it; None keeps the type of the file. rename: parameter name -> name in the files.
    mapped: leave runs of whole rows in the mapped file instead of copying them: less memory that cannot be dropped, but the
    files must stay as they are while the model lives, and the first steps read from disk."""
    comm = config.collectives()
    resolved, weights = None, None
    facts = Facts(None)
    try:
        weights = open_source(source)
        check_model(model, allow_meta=True)
        rules = plan_of(model) if tp_plan is None else tp_plan
        resolved = resolve_plan(model, rules, comm.size, config.shares, strict=tp_plan is not None if strict is None else strict)
        wanted = _wanted(model, weights, resolved, rename or (lambda name: name))
        facts = Facts(None, digest_plan(resolved))
    except ShardwiseError as error:
        facts = Facts(error)
    if agree(comm, facts):
        comm = staged_over(comm)
    assert resolved is not None  # agree() raised otherwise
    assert weights is not None
    device = config.target_device(comm.rank) or torch.device("cpu")
    tensors = _read_all(model, weights, resolved, wanted, comm.rank, dtype, device, mapped)
    bind(model, resolved, context_for(config, comm, resolved), tensors)
    return model


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(name, tensor, needed): needed are parameters and persistent buffers."""
    persistent = set(model.state_dict(keep_vars=True))
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        yield name, tensor, name in persistent


def _wanted(model: nn.Module, source: WeightSource, resolved: ResolvedPlan, rename: Callable[[str], str]) -> dict[str, str]:
    """Parameter name -> name in the source. UsageError for what is missing or has another shape."""
    available = set(source.names())
    by_tensor: dict[int, list[str]] = {}
    for name, tensor, needed in _tensors(model):
        if needed:
            by_tensor.setdefault(id(tensor), []).append(name)
    out: dict[str, str] = {}
    for name, tensor, needed in _tensors(model):
        if not needed:
            if tensor.is_meta:
                raise UsageError(
                    "a buffer that no file has is on meta", where=name, hint="build the model with shardwise.tp.empty_model"
                )
            continue
        # a tied tensor may be stored under any of its names
        stored = next((rename(other) for other in by_tensor[id(tensor)] if rename(other) in available), None)
        if stored is None:
            path = name.rpartition(".")[0]
            rule = resolved.shards[path].rule if path in resolved.shards else None
            what = f"which the rule '{rule}' splits" if rule else "which every rank holds"
            raise UsageError(f"the checkpoint lacks '{rename(name)}', {what}", where=name)
        if source.shape(stored) != tuple(tensor.shape):
            raise UsageError(f"the checkpoint has {source.shape(stored)} for a tensor of {tuple(tensor.shape)}", where=name)
        out[name] = stored
    return out


def _read_all(
    model: nn.Module,
    source: WeightSource,
    resolved: ResolvedPlan,
    wanted: Mapping[str, str],
    rank: int,
    dtype: torch.dtype | None,
    device: torch.device,
    mapped: bool,
) -> dict[str, torch.Tensor]:
    """This rank's tensors by full name."""
    out: dict[str, torch.Tensor] = {}
    done: dict[int, torch.Tensor] = {}
    for name, tensor, needed in _tensors(model):
        if not needed:
            if tensor.device != device:
                out[name] = tensor.to(device)
            continue
        if id(tensor) not in done:
            stored = wanted[name]
            own = source.dtype(stored)
            target = dtype if dtype is not None and own.is_floating_point else own
            layout = resolved.layout_of(name, tensor.shape)
            done[id(tensor)] = layout.read(partial(source.read, stored), rank, target, device, mapped=mapped)
        out[name] = done[id(tensor)]
    return out
