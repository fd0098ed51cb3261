"""Placing whole experts on ranks. Pure: loads and shares in, owners out.

Greedy by falling load onto the rank with the least load relative to its share (longest processing time first, Graham 1969:
within 4/3 of the best makespan on equal ranks), under a cap on the number of experts in proportion to the shares, because
memory is what a rank runs out of first.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.errors import UsageError
from shardwise.tp.split import Shares, deal_units, divisors


def place_experts(
    num_experts: int, degree: int, shares: Shares | None, loads: Sequence[float] | None = None, *, where: str = ""
) -> list[list[int]]:
    """Experts of each rank, ascending. Without loads: consecutive runs. UsageError: indivisible without shares, more ranks
    than experts, loads of another length or negative."""
    if shares is None and num_experts % degree:
        raise UsageError(
            f"cannot deal {num_experts} experts evenly to {degree} ranks",
            where=where,
            hint=f"degrees that work: {divisors(num_experts)}; or ask for an uneven split with shares={[1] * degree}",
        )
    weights = shares or (1.0,) * degree
    counts = deal_units(num_experts, weights)
    if loads is None:
        starts = [sum(counts[:rank]) for rank in range(degree)]
        return [list(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]
    if len(loads) != num_experts or any(load < 0 for load in loads):
        raise UsageError(f"{len(loads)} loads for {num_experts} experts, each must be >= 0", where=where)
    owners: list[list[int]] = [[] for _ in range(degree)]
    carried = [0.0] * degree
    for expert in sorted(range(num_experts), key=lambda e: (-loads[e], e)):
        open_ranks = [rank for rank in range(degree) if len(owners[rank]) < counts[rank]]
        rank = min(open_ranks, key=lambda r: ((carried[r] + loads[expert]) / weights[r], r))
        owners[rank].append(expert)
        carried[rank] += loads[expert]
    return [sorted(experts) for experts in owners]


def relative_loads(owners: Sequence[Sequence[int]], loads: Sequence[float], shares: Sequence[float] | None = None) -> list[float]:
    """Each rank's load over its fair part of the total: 1.0 everywhere is perfect balance."""
    total = sum(loads) or 1.0
    weights = list(shares or [1.0] * len(owners))
    return [
        sum(loads[e] for e in experts) / (total * weight / sum(weights)) if weight else 0.0
        for experts, weight in zip(owners, weights, strict=True)
    ]
