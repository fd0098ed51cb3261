"""Runs a split model in one process, its ranks as threads: a dry run with real numbers, without processes or sockets.

Promises: the same kernels and collectives' order as on real ranks. Fails when: the plan is refused, or the forward of a split
module fails, which is how plan inference learns that a candidate is wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.tp.apply import apply_tensor_parallel
from shardwise.tp.config import TensorParallelConfig
from shardwise.tp.threads import ThreadCollectives, run_ranks


def simulate(
    model: nn.Module,
    plan: Mapping[str, Any] | None,
    run: Callable[[nn.Module], Any],
    *,
    degree: int = 2,
    shares: Sequence[float] | None = None,
    strict: bool | None = None,
    timeout_s: float = 60.0,
) -> list[Any]:
    """`run(split copy)` on every rank, by rank, without gradients. The model itself is not touched."""
    copies = [copy.deepcopy(model) for _ in range(degree)]

    def work(comm: ThreadCollectives) -> Any:
        config = TensorParallelConfig(tp_degree=degree, shares=shares, group=comm)
        split = apply_tensor_parallel(copies[comm.rank], config, plan, strict=strict)
        with torch.no_grad():
            return run(split)

    return run_ranks(degree, work, timeout_s=timeout_s)
