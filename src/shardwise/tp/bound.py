"""What a split module carries (`module._tp_shard`): its decision, the way to the other ranks, and its own forward.

A module is changed in three places only: its tensors become local, `forward` becomes an instance attribute, and `_tp_shard`
is set. `undo` reverses exactly these. A deep copy of a model shares the group and stays split.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.tp.collectives import Collectives
from shardwise.tp.resolve import ModuleShard
from shardwise.tp.split import deal_units

SHARD = "_tp_shard"


@dataclass
class TpContext:
    """What all modules of one split model share."""

    comm: Collectives
    shares: tuple[float, ...] | None = None
    sequence_dim: int = 1
    overlap_chunks: int = 1
    sequence_lengths: dict[int, int] = field(default_factory=dict)
    """Local number of rows -> all rows, filled where a sequence is cut."""

    def __deepcopy__(self, memo: dict[int, Any]) -> TpContext:
        return self

    def row_sizes(self, total: int) -> tuple[int, ...]:
        """Rows per rank of a sequence of `total` rows."""
        sizes = deal_units(total, self.shares or (1.0,) * self.comm.size)
        self.sequence_lengths[sizes[self.comm.rank]] = total
        return sizes

    def row_sizes_of_local(self, local: int) -> tuple[int, ...]:
        """Rows per rank, from this rank's number of rows and what was cut before."""
        total = self.sequence_lengths.get(local, local * self.comm.size)
        return deal_units(total, self.shares or (1.0,) * self.comm.size)


@dataclass
class BoundShard:
    """One split module."""

    shard: ModuleShard
    context: TpContext
    own_forward: Callable[..., Any]
    """The forward it had, as a plain function of (module, ...)."""
    replaced: Any = None
    """The instance attribute `forward` it had before, if any."""
    tables: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    hooks: list[Any] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundShard:
        return self

    @property
    def comm(self) -> Collectives:
        return self.context.comm

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The module's own computation, on its local tensors."""
        return self.own_forward(module, *args, **kwargs)


def own_forward_of(module: nn.Module) -> tuple[Callable[..., Any], Any]:
    """A module's forward as a plain function, and the instance attribute that it came from (None: its class)."""
    replaced = module.__dict__.get("forward")
    if replaced is None:
        return type(module).forward, None
    if isinstance(replaced, types.MethodType) and replaced.__self__ is module:
        return replaced.__func__, replaced
    return lambda self, *args, **kwargs: replaced(*args, **kwargs), replaced


def shard_of(module: nn.Module) -> BoundShard | None:
    """The module's binding, None if it is not split."""
    return module.__dict__.get(SHARD)


def bound_modules(model: nn.Module) -> dict[str, BoundShard]:
    """Every split module by path."""
    return {name: bound for name, module in model.named_modules() if (bound := shard_of(module)) is not None}
