"""The forwards of split modules: enter, compute on plain local tensors, leave.

Shape legend: B batch, T rows of the sequence, I local inputs, O local outputs, V vocabulary, D hidden, E experts, K experts per
token. A kernel is a function `(bound, module, args, kwargs) -> output`; `register_kernel` adds one for a user's style.

What can fail: a lost rank (`collectives`). Nothing here checks shapes: `resolve` did.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.errors import UsageError
from shardwise.tp import functional as moves
from shardwise.tp.bound import BoundShard
from shardwise.tp.dims import is_transposed

Kernel = Callable[[BoundShard, nn.Module, tuple[Any, ...], dict[str, Any]], Any]

_KERNELS: dict[str, Kernel] = {}


def register_kernel(name: str, kernel: Kernel, *, replace_existing: bool = False) -> None:
    """Name a forward for use in a `Style`. UsageError if the name is taken."""
    if name in _KERNELS and not replace_existing:
        raise UsageError(f"a kernel named '{name}' exists already")
    _KERNELS[name] = kernel


def enter(bound: BoundShard, x: torch.Tensor) -> torch.Tensor:
    """What the style does to the first input."""
    how, comm, context = bound.shard.style.enter, bound.comm, bound.context
    if how == "copy":
        return moves.copy_to_ranks(x, comm)
    if how == "split" and bound.shard.part is not None:
        return moves.split_shards(x, comm, bound.shard.part, bound.numbers["split"])
    if how == "gather_rows":
        return moves.gather_rows(x, comm, context.sequence_dim, context.row_sizes_of_local(x.shape[context.sequence_dim]))
    if how == "split_rows":
        return moves.take_rows(x, comm, context.sequence_dim, context.row_sizes(x.shape[context.sequence_dim]))
    return x


def leave(bound: BoundShard, y: torch.Tensor) -> torch.Tensor:
    """What the style does to the output, which must be a fresh tensor."""
    how, comm, context = bound.shard.style.leave, bound.comm, bound.context
    if how == "reduce":
        return moves.reduce_from_ranks(y, comm)
    if how == "gather" and bound.shard.part is not None:
        return moves.gather_shards(y, comm, bound.shard.part, bound.numbers["gather"])
    if how == "scatter_rows":
        return moves.scatter_rows(y, comm, context.sequence_dim, context.row_sizes(y.shape[context.sequence_dim]))
    if how == "gather_rows":
        return moves.join_rows(y, comm, context.sequence_dim, context.row_sizes_of_local(y.shape[context.sequence_dim]))
    return y


def forward_split(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward that a split module gets."""
    bound: BoundShard = self._tp_shard
    if args and isinstance(args[0], torch.Tensor):
        args = (enter(bound, args[0]), *args[1:])
    elif kwargs:
        name = next(iter(kwargs))
        if isinstance(kwargs[name], torch.Tensor):
            kwargs[name] = enter(bound, kwargs[name])
    return _KERNELS[bound.shard.style.kernel](bound, self, args, kwargs)


def forward_linear_column(self: nn.Module, input: torch.Tensor) -> torch.Tensor:
    """(..., I) -> (..., O local), for a plain nn.Linear."""
    if torch.is_grad_enabled():
        input = moves.copy_to_ranks(input, self._tp_shard.context.comm)
    return F.linear(input, self.weight, self.bias)


def forward_linear_row(self: nn.Module, input: torch.Tensor) -> torch.Tensor:
    """(..., I local) -> (..., O), for a plain nn.Linear: one all-reduce, then the bias once."""
    context = self._tp_shard.context
    if context.overlap_chunks > 1 and not torch.is_grad_enabled():
        y = _chunked_row(input, self.weight, context.comm, context.overlap_chunks)
    else:
        y = moves.reduce_from_ranks(F.linear(input, self.weight), context.comm)
    return y if self.bias is None else y + self.bias


def _chunked_row(x: torch.Tensor, weight: torch.Tensor, comm: Any, chunks: int) -> torch.Tensor:
    """The product by chunks of rows, so that one chunk's sum travels while the next is computed."""
    rows = x.reshape(-1, x.shape[-1])
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    pending = []
    for piece, target in zip(rows.chunk(chunks), out.chunk(chunks), strict=False):
        torch.mm(piece, weight.t(), out=target)
        pending.append((target, comm.start_all_reduce(target)))
    for target, finish in pending:
        total = finish()
        if total is not target:
            target.copy_(total)
    return out.view(*x.shape[:-1], weight.shape[0])


def _plain(bound: BoundShard, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    y = bound.call(module, *args, **kwargs)
    if isinstance(y, tuple):
        return (leave(bound, y[0].clone() if bound.shard.style.leave == "reduce" else y[0]), *y[1:])
    return leave(bound, y.clone() if bound.shard.style.leave == "reduce" else y)


def _row(bound: BoundShard, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Local inputs: the product without bias is summed, then the bias is added once."""
    bias = module._parameters.get("bias")
    if is_transposed(module):
        y = args[0] @ module.weight
    elif type(module).forward is nn.Linear.forward:
        y = F.linear(args[0], module.weight)
    else:
        y = _without_bias(bound, module, args, kwargs)
    y = leave(bound, y)
    return y if bias is None else y + bias


def _without_bias(bound: BoundShard, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bias = module._parameters.get("bias")
    module._parameters["bias"] = None
    try:
        return bound.call(module, *args, **kwargs)
    finally:
        module._parameters["bias"] = bias


def _vocab(bound: BoundShard, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """ids (B, T) -> (B, T, D): each rank looks up the rows it holds, the rest count as zero, then the sum."""
    ids = args[0] if args else kwargs["input"]
    local = bound.tables["local_index"][ids]
    mine = local >= 0
    if module.weight.shape[0] == 0:
        # tied to the (empty) weight, so that this rank goes backward like the others
        y = moves.touched(module.weight.new_zeros((*ids.shape, module.weight.shape[1])), module.weight)
    else:
        y = bound.call(module, local.clamp(min=0)) * mine.unsqueeze(-1)
    return leave(bound, y)


def _rms_norm(bound: BoundShard, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """RMSNorm over a dimension that is spread over ranks: x * rsqrt(sum over ranks of x^2 / N + eps) * weight.

    The sum travels in fp32, one number a row. Rounding follows the family: torch multiplies by the weight before casting
    back, Gemma by (1 + weight), Llama casts first. Source: Zhang & Sennrich, arXiv:1910.07467."""
    x, comm, part = args[0], bound.comm, bound.shard.part
    wide = x.float()
    squares = wide * wide
    if "inverse_copies" in bound.tables:
        squares = squares * bound.tables["inverse_copies"]
    total = moves.sum_shared(squares.sum(-1, keepdim=True), comm)
    eps = _eps(module, x.dtype)
    normed = wide * torch.rsqrt(total / (part.size if part else x.shape[-1]) + eps)
    weight = getattr(module, "weight", None)
    if weight is None:
        return normed.to(x.dtype)
    if type(module).__name__.startswith("Gemma"):
        return (normed * (1.0 + weight.float())).to(x.dtype)
    if isinstance(module, nn.RMSNorm):
        return (normed * weight).to(x.dtype)
    return weight * normed.to(x.dtype)


def _eps(module: nn.Module, dtype: torch.dtype) -> float:
    for name in ("eps", "variance_epsilon"):
        value = getattr(module, name, None)
        if value is not None:
            return float(value)
    return float(torch.finfo(dtype).eps)


def _moe_tensor(bound: BoundShard, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Every rank runs its slice of every expert: (tokens, D), indices (tokens, K), weights (tokens, K) -> the sum."""
    x, index, weights, *rest = args
    comm = bound.comm
    x, weights = moves.copy_to_ranks(x, comm), moves.copy_to_ranks(weights, comm)
    if _holds_nothing(module):
        return moves.reduce_from_ranks(_zeros_touching(module, x, weights), comm)
    return moves.reduce_from_ranks(bound.call(module, x, index, weights, *rest, **kwargs), comm)


def _holds_nothing(module: nn.Module) -> bool:
    return any(parameter.numel() == 0 for parameter in module.parameters(recurse=False))


def _zeros_touching(module: nn.Module, *used: torch.Tensor) -> torch.Tensor:
    """What a rank without experts adds: zeros, tied to everything that the other ranks go backward through."""
    return moves.touched(torch.zeros_like(used[0]), *used, *module.parameters(recurse=False))


def _moe_expert(bound: BoundShard, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Every rank runs whole experts: choices of other ranks' experts go to the number after the last, which experts
    modules skip, with weight 0; then the sum over ranks."""
    x, index, weights, *rest = args
    comm = bound.comm
    x, weights = moves.copy_to_ranks(x, comm), moves.copy_to_ranks(weights, comm)
    if _holds_nothing(module):
        return moves.reduce_from_ranks(_zeros_touching(module, x, weights), comm)
    local = bound.tables["local_index"][index]
    mine = local >= 0
    sent = torch.where(mine, local, bound.numbers["num_local"])
    y = bound.call(module, x, sent, torch.where(mine, weights, torch.zeros_like(weights)), *rest, **kwargs)
    return moves.reduce_from_ranks(moves.touched(y, x, weights), comm)


def _divide(bound: BoundShard, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A module that all ranks compute alike, inside something that is summed over ranks."""
    return bound.call(module, args[0] / bound.comm.size, *args[1:], **kwargs)


def _mla_kv_a(bound: BoundShard, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multi-head latent attention: the last `rope` outputs go straight to every rank's heads, so their gradient is summed."""
    y = bound.call(module, *args, **kwargs)
    rope = bound.numbers["rope"]
    return torch.cat([y[..., :-rope], moves.copy_to_ranks(y[..., -rope:], bound.comm)], -1)


for _name, _kernel in (
    ("plain", _plain),
    ("row", _row),
    ("vocab", _vocab),
    ("rms_norm", _rms_norm),
    ("moe_tensor", _moe_tensor),
    ("moe_expert", _moe_expert),
    ("divide", _divide),
    ("mla_kv_a", _mla_kv_a),
):
    register_kernel(_name, _kernel)


def forward_for(bound: BoundShard, module: nn.Module) -> types.MethodType | None:
    """The bound method that replaces `forward`; None where the module's own one is right as it is."""
    style = bound.shard.style
    if bound.comm.size == 1:
        return None
    if (style.enter, style.leave, style.kernel) == ("as_is", "as_is", "plain"):
        return None
    if style.kernel not in _KERNELS:
        raise UsageError(f"style '{style.name}' names the unknown kernel '{style.kernel}'", where=bound.shard.path)
    plain_linear = type(module).forward is nn.Linear.forward and bound.replaced is None
    if plain_linear and (style.enter, style.leave, style.kernel) == ("copy", "as_is", "plain"):
        return types.MethodType(forward_linear_column, module)
    if plain_linear and (style.enter, style.leave, style.kernel) == ("as_is", "reduce", "row"):
        return types.MethodType(forward_linear_row, module)
    return types.MethodType(forward_split, module)
