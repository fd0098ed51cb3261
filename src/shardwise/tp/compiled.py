"""The moves of `functional` as one opaque custom operator, so that `torch.compile` keeps one graph around them.

A `Move` is registered once when a module is bound and gets a number; the operator `shardwise_tp::move(x, number)` runs it. Its
backward is the dual move. Eager code never comes here: the autograd functions of `functional` are cheaper.

Limits: sequence-parallel moves depend on the length of the sequence and stay eager (the graph breaks there). Collectives of
one graph keep their order because every rank compiles the same graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.tp.collectives import Collectives
from shardwise.tp.layout import Partition, ShardLayout

_DUALS = {"copy": "sum", "reduce": "pass", "sum_shared": "sum", "gather": "split", "split": "gather"}


@dataclass(frozen=True)
class Move:
    """One move over one group: copy, reduce, sum_shared, gather or split."""

    kind: str
    comm: Collectives
    part: Partition | None = None

    def run(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        """Forward or, with the dual's name, backward. Never gives back its input's memory."""
        if kind in ("copy", "pass"):
            return x.clone()
        if kind in ("reduce", "sum_shared", "sum"):
            return self.comm.all_reduce(x.clone(memory_format=torch.contiguous_format))
        assert self.part is not None  # gather and split are registered with one
        layout = ShardLayout((*x.shape[:-1], self.part.size), x.dim() - 1, self.part)
        if kind == "split":
            return layout.take(x, self.comm.rank)
        return layout.assemble(self.comm.all_gather(x.contiguous(), self.part.local_sizes, -1))

    def shape(self, x: torch.Tensor, kind: str) -> tuple[Any, ...]:
        if kind in ("gather", "split") and self.part is not None:
            return (*x.shape[:-1], self.part.size if kind == "gather" else self.part.local_sizes[self.comm.rank])
        return tuple(x.shape)


_MOVES: list[Move] = []


def register_move(kind: str, comm: Collectives, part: Partition | None = None) -> int:
    """The number of a move; equal ones share it."""
    wanted = Move(kind, comm, part)
    for number, known in enumerate(_MOVES):
        if known.kind == kind and known.comm is comm and known.part is part:
            return number
    _MOVES.append(wanted)
    return len(_MOVES) - 1


@torch.library.custom_op("shardwise_tp::move", mutates_args=())
def move(x: torch.Tensor, number: int, backward: bool) -> torch.Tensor:
    """Run a registered move, or its dual."""
    known = _MOVES[number]
    return known.run(x, _DUALS[known.kind] if backward else known.kind)


@move.register_fake
def _move_fake(x: torch.Tensor, number: int, backward: bool) -> torch.Tensor:
    known = _MOVES[number]
    return x.new_empty(known.shape(x, _DUALS[known.kind] if backward else known.kind))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.number = inputs[1]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None, None]:
    return move(grad, ctx.number, True), None, None


move.register_autograd(_backward, setup_context=_setup)
