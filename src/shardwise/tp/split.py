"""Pure arithmetic of splitting: sizes and shares in, `Partition`s out. No tensor, no module, no process group.

Even splits (no shares given) refuse what does not divide and name the degrees that would work. With shares, whole units
(a head, a KV group, a quantization block, else one row) are dealt by largest remainder, and a rank with a positive share
gets at least one unit while there are enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwise.errors import UsageError
from shardwise.tp.layout import Partition, Piece, concatenated, joined

Shares = tuple[float, ...]


def checked_shares(shares: Sequence[float] | None, degree: int) -> Shares | None:
    """Shares as floats; UsageError unless there is one per rank, all finite and not negative, one positive."""
    if shares is None:
        return None
    values = tuple(float(share) for share in shares)
    if len(values) != degree:
        raise UsageError(f"{len(values)} shares for {degree} ranks", hint=f"give {degree} shares, 0 for a rank without work")
    for rank, share in enumerate(values):
        if not math.isfinite(share) or share < 0:
            raise UsageError(f"share {share} of rank {rank} is not a finite number >= 0")
    if not any(values):
        raise UsageError("all shares are 0", hint="one rank at least must hold the model")
    return values


def divisors(value: int) -> list[int]:
    return [d for d in range(1, value + 1) if value % d == 0]


def deal_units(num_units: int, shares: Shares) -> tuple[int, ...]:
    """Whole units per rank, in proportion to the shares (largest remainder, the lower rank first on ties); ranks with a
    positive share get at least one while there are enough units."""
    positive = [rank for rank, share in enumerate(shares) if share > 0]
    total = sum(shares)
    ideal = [num_units * share / total for share in shares]
    counts = [math.floor(value + 1e-9) for value in ideal]
    by_remainder = sorted(positive, key=lambda rank: (counts[rank] - ideal[rank], rank))
    for rank in by_remainder[: num_units - sum(counts)]:
        counts[rank] += 1
    if num_units >= len(positive):
        for rank in positive:
            if counts[rank] == 0:
                giver = max(positive, key=lambda r: (counts[r], -r))
                counts[giver] -= 1
                counts[rank] = 1
    return tuple(counts)


def contiguous(counts: Sequence[int], unit: int = 1, *, zero_unit: bool = False) -> Partition:
    """Consecutive runs of `counts[rank]` units; with `zero_unit` a rank without units holds one unit of zeros."""
    parts, start = [], 0
    for count in counts:
        length = count * unit
        empty = (Piece(-1, unit),) if zero_unit else ()
        parts.append((Piece(start, length),) if length else empty)
        start += length
    return Partition(start, tuple(parts))


def split_size(size: int, degree: int, shares: Shares | None, *, unit: int = 1, where: str = "") -> Partition:
    """`size` indices in whole units over `degree` ranks."""
    if unit < 1 or size % unit:
        raise UsageError(
            f"size {size} is not a whole number of units of {unit}", where=where, hint="choose a unit that divides it"
        )
    num_units = size // unit
    if shares is None:
        if num_units % degree:
            what = f"{size}" if unit == 1 else f"{size} ({num_units} units of {unit})"
            raise UsageError(
                f"cannot split {what} evenly over {degree} ranks",
                where=where,
                hint=f"degrees that work: {divisors(num_units)[:16]}; or ask for an uneven split with shares={[1] * degree}",
            )
        return contiguous([num_units // degree] * degree, unit)
    return contiguous(deal_units(num_units, shares), unit)


def block_sizes(total: int, blocks: Sequence[int], *, where: str = "") -> list[int]:
    """Proportional integers -> sizes: 1152 in [1, 1, 1, 3, 3] -> [128, 128, 128, 384, 384]."""
    values = [int(block) for block in blocks]
    if not values or any(block <= 0 for block in values) or any(value != block for value, block in zip(values, blocks)):
        raise UsageError(f"blocks {list(blocks)} are not positive whole numbers", where=where)
    if total % sum(values):
        raise UsageError(
            f"blocks {values} with sum {sum(values)} do not divide {total}",
            where=where,
            hint="give the blocks in the proportion of the fused parts, or their sizes",
        )
    return [block * (total // sum(values)) for block in values]


def packed(partitions: Sequence[Partition]) -> Partition:
    """Blocks that are each split on their own, one after the other."""
    return concatenated(partitions)


def by_index(owners: Sequence[Sequence[int]], size: int) -> Partition:
    """Arbitrary index sets (experts): rank r holds `owners[r]`, in that order."""
    parts = tuple(joined(Piece(int(index), 1) for index in indices) for indices in owners)
    return Partition(size, parts).checked()
