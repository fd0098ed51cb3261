"""The differentiable moves of tensor parallelism, as autograd functions over a `Collectives`.

    forward                                  backward
    copy_to_ranks     nothing                sum of the gradients over ranks
    reduce_from_ranks sum over ranks         nothing
    sum_shared        sum over ranks         sum over ranks (every rank uses the sum in its own way: norms across ranks)
    gather_shards     all ranks' parts       own part of the gradient (everything after it is the same on every rank)
    split_shards      own part               all ranks' parts of the gradient
    gather_rows       all ranks' rows        reduce-scatter (what follows is partial per rank: sequence parallelism)
    scatter_rows      reduce-scatter         all ranks' rows
    take_rows         own rows               all ranks' rows
    join_rows         all ranks' rows        own rows (what follows is the same on every rank)
    touched           nothing                zeros for tensors that a rank did not use, so that all ranks go backward alike

Under `torch.compile` each move is one opaque custom operator (see `compiled`), so a graph is not broken. Sources: Megatron-LM
(arXiv:1909.08053, f and g; arXiv:2205.05198 section 4.2.2, g-bar).
Fails when: a rank is gone, see `collectives`.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.tp.collectives import Collectives
from shardwise.tp.compiled import move
from shardwise.tp.layout import Partition, ShardLayout


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Collectives) -> torch.Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.comm.all_reduce(grads[0].clone(memory_format=torch.contiguous_format)), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Collectives) -> torch.Tensor:
        return comm.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class _SumShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Collectives) -> torch.Tensor:
        ctx.comm = comm
        return comm.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.comm.all_reduce(grads[0].clone(memory_format=torch.contiguous_format)), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Collectives, part: Partition) -> torch.Tensor:
        ctx.comm, ctx.part = comm, part
        return gather_parts(x, comm, part)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return take_part(grads[0], ctx.part, ctx.comm.rank), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Collectives, part: Partition) -> torch.Tensor:
        ctx.comm, ctx.part = comm, part
        return take_part(x, part, comm.rank)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return gather_parts(grads[0], ctx.comm, ctx.part), None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Collectives, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
        ctx.comm, ctx.dim, ctx.sizes = comm, dim, sizes
        return torch.cat(comm.all_gather(x, sizes, dim), dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.comm.reduce_scatter(grads[0].contiguous(), ctx.sizes, ctx.dim), None, None, None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Collectives, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
        ctx.comm, ctx.dim, ctx.sizes = comm, dim, sizes
        return comm.reduce_scatter(x.contiguous(), sizes, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return torch.cat(ctx.comm.all_gather(grads[0].contiguous(), ctx.sizes, ctx.dim), ctx.dim), None, None, None


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Collectives, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
        ctx.comm, ctx.dim, ctx.sizes = comm, dim, sizes
        return x.narrow(dim, sum(sizes[: comm.rank]), sizes[comm.rank]).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return torch.cat(ctx.comm.all_gather(grads[0].contiguous(), ctx.sizes, ctx.dim), ctx.dim), None, None, None


class _JoinRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Collectives, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
        ctx.comm, ctx.dim, ctx.sizes = comm, dim, sizes
        return torch.cat(comm.all_gather(x.contiguous(), sizes, dim), dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].narrow(ctx.dim, sum(ctx.sizes[: ctx.comm.rank]), ctx.sizes[ctx.comm.rank]), None, None, None


class _Touch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, *used: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [(tuple(t.shape), t.dtype, t.device) for t in used]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes)


def gather_parts(x: torch.Tensor, comm: Collectives, part: Partition) -> torch.Tensor:
    """The last dimension in its global order, from every rank's local part of it."""
    locals_by_rank = comm.all_gather(x.contiguous(), part.local_sizes, -1)
    if part.is_contiguous:
        return torch.cat(locals_by_rank, -1)
    return ShardLayout((*x.shape[:-1], part.size), x.dim() - 1, part).assemble(locals_by_rank)


def take_part(x: torch.Tensor, part: Partition, rank: int) -> torch.Tensor:
    """This rank's part of the last dimension."""
    pieces = part.parts[rank]
    if len(pieces) == 1 and pieces[0].start >= 0:
        return x.narrow(-1, *pieces[0])
    return ShardLayout(tuple(x.shape), x.dim() - 1, part).take(x, rank)


def copy_to_ranks(x: torch.Tensor, comm: Collectives) -> torch.Tensor:
    """Identity; gradients are summed. Free where no gradient is wanted."""
    if comm.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    if torch.compiler.is_compiling():
        return move(x, comm.numbers["copy"], False)
    return _Copy.apply(x, comm)


def reduce_from_ranks(x: torch.Tensor, comm: Collectives) -> torch.Tensor:
    """Sum of a freshly computed tensor over ranks (in place where no gradient is wanted)."""
    if comm.size == 1:
        return x
    if torch.compiler.is_compiling():
        return move(x, comm.numbers["reduce"], False)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Reduce.apply(x, comm)
    return comm.all_reduce(x)


def sum_shared(x: torch.Tensor, comm: Collectives) -> torch.Tensor:
    """Sum over ranks where each rank goes on differently with it; gradients are summed too."""
    if comm.size == 1:
        return x
    if torch.compiler.is_compiling():
        return move(x, comm.numbers["sum_shared"], False)
    if torch.is_grad_enabled() and x.requires_grad:
        return _SumShared.apply(x, comm)
    return comm.all_reduce(x)


def gather_shards(x: torch.Tensor, comm: Collectives, part: Partition, number: int = -1) -> torch.Tensor:
    """(..., local) -> (..., size) in global order. number: of the registered move, for compiled graphs."""
    if comm.size == 1:
        return x
    if number >= 0 and torch.compiler.is_compiling():
        return move(x, number, False)
    return _Gather.apply(x, comm, part)


def split_shards(x: torch.Tensor, comm: Collectives, part: Partition, number: int = -1) -> torch.Tensor:
    """(..., size) -> (..., local)."""
    if comm.size == 1:
        return x
    if number >= 0 and torch.compiler.is_compiling():
        return move(x, number, False)
    return _Split.apply(x, comm, part)


def gather_rows(x: torch.Tensor, comm: Collectives, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """Local rows -> all rows along `dim`; what follows is partial per rank."""
    return x if comm.size == 1 else _GatherRows.apply(x, comm, dim, sizes)


def scatter_rows(x: torch.Tensor, comm: Collectives, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """Partial sums of all rows -> the finished local rows along `dim`."""
    return x if comm.size == 1 else _ScatterRows.apply(x, comm, dim, sizes)


def take_rows(x: torch.Tensor, comm: Collectives, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """Replicated rows -> the local ones."""
    return x if comm.size == 1 else _TakeRows.apply(x, comm, dim, sizes)


def join_rows(x: torch.Tensor, comm: Collectives, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """Finished local rows -> all rows, replicated."""
    return x if comm.size == 1 else _JoinRows.apply(x, comm, dim, sizes)


def touched(y: torch.Tensor, *used: torch.Tensor) -> torch.Tensor:
    """`y`, tied to `used` in the graph even where it was computed without them."""
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in used):
        return y
    return _Touch.apply(y, *used)
