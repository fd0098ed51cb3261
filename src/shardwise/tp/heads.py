"""Attention by whole heads: how many query and key/value heads each rank gets, as pure arithmetic.

Rules, in this order:
1. there are at least as many KV heads as ranks with work: whole KV groups (a KV head with its query heads) are dealt, so
   nothing is held twice;
2. otherwise whole query heads are dealt, and each rank holds the KV heads that its query heads need. Where a rank's query
   heads use their KV heads in runs of different lengths, KV heads are repeated to the greatest common divisor of the runs,
   so that the module's own `repeat_kv` (one constant factor) stays right;
3. a rank without heads computes on one head of zeros (a view into `(..., heads, head_dim)` needs at least one); all its
   weights are zero, so it adds exactly nothing and its gradients are exactly zero.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from shardwise.errors import UsageError
from shardwise.tp.layout import ZEROS, Partition, Piece, joined
from shardwise.tp.split import Shares, contiguous, deal_units, divisors


@dataclass(frozen=True)
class HeadSplit:
    """One attention module over the ranks. `q` and `kv` are partitions of head *numbers*; scale them by `head_dim`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q: Partition
    kv: Partition
    groups: tuple[int, ...]
    """Query heads per KV head on each rank: the local value of `num_key_value_groups`."""

    @property
    def q_features(self) -> Partition:
        return self.q.scaled(self.head_dim)

    @property
    def kv_features(self) -> Partition:
        return self.kv.scaled(self.head_dim)

    @property
    def replicates_kv(self) -> bool:
        return self.kv.has_copies


def valid_degrees(num_heads: int) -> list[int]:
    """Degrees that give every rank the same number of query heads."""
    return divisors(num_heads)


def split_heads(
    num_heads: int, num_kv_heads: int, head_dim: int, degree: int, shares: Shares | None, *, where: str = ""
) -> HeadSplit:
    """Deal heads to ranks. UsageError: heads no multiple of KV heads, fewer heads than ranks, indivisible without shares."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise UsageError(f"{num_heads} query heads are no multiple of {num_kv_heads} KV heads", where=where)
    working = degree if shares is None else sum(share > 0 for share in shares)
    if num_heads < working:
        raise UsageError(
            f"{num_heads} attention heads cannot occupy {working} ranks",
            where=where,
            hint=f"degrees that work: {valid_degrees(num_heads)}; or give a share of 0 to {working - num_heads} rank(s)",
        )
    if shares is None and num_heads % degree:
        raise UsageError(
            f"cannot split {num_heads} attention heads evenly over {degree} ranks",
            where=where,
            hint=f"degrees that work: {valid_degrees(num_heads)}; or ask for an uneven split with shares={[1] * degree}",
        )
    repeats = num_heads // num_kv_heads
    weights = shares or (1.0,) * degree
    if num_kv_heads >= working and (shares is not None or num_kv_heads % degree == 0):
        kv_counts = deal_units(num_kv_heads, weights)
        q = contiguous([count * repeats for count in kv_counts], zero_unit=True)
        kv = contiguous(kv_counts, zero_unit=True)
        groups = tuple(repeats if count else 1 for count in kv_counts)
        return HeadSplit(num_heads, num_kv_heads, head_dim, _one_zero_head(q), kv, groups)
    counts = deal_units(num_heads, weights)
    kv_parts, groups_list, start = [], [], 0
    for count in counts:
        part, group = _kv_for(start, count, repeats)
        kv_parts.append(part)
        groups_list.append(group)
        start += count
    q = contiguous(counts, zero_unit=True)
    return HeadSplit(num_heads, num_kv_heads, head_dim, q, Partition(num_kv_heads, tuple(kv_parts)), tuple(groups_list))


def _one_zero_head(q: Partition) -> Partition:
    """A rank without heads gets one zero query head."""
    parts = tuple(part if part and part[0].start != ZEROS else (Piece(ZEROS, 1),) for part in q.parts)
    return Partition(q.size, parts)


def _kv_for(start: int, count: int, repeats: int) -> tuple[tuple[Piece, ...], int]:
    """KV heads for query heads [start, start + count), and how many query heads share each of them."""
    if count == 0:
        return (Piece(ZEROS, 1),), 1
    runs = [
        (kv, len(list(members))) for kv, members in itertools.groupby(head // repeats for head in range(start, start + count))
    ]
    group = math.gcd(*(length for _, length in runs))
    return joined(Piece(kv, 1) for kv, length in runs for _ in range(length // group)), group
