"""Cases that run on every rank of a group; each gives plain data."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.tp import TensorParallelConfig
from tests.tp import models, parity


def mlp(rank: int, world: int, *, shares: list[float] | None, bias: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = models.Mlp(bias=bias)
    x = torch.randn(3, 5, 24)
    config = TensorParallelConfig(tp_degree=world, shares=shares)
    return parity.compare(model, {"up": "colwise", "down": "rowwise"}, lambda m: m(x), config=config)
