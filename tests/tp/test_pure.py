"""The arithmetic of splitting, without tensors of a model or ranks: partitions, heads, experts, layouts, blocks."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import UsageError
from shardwise.tp.experts import place_experts, relative_loads
from shardwise.tp.heads import split_heads
from shardwise.tp.layout import ZEROS, Partition, Piece, ShardLayout
from shardwise.tp.split import block_sizes, by_index, deal_units, packed, split_size

shares_of = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any).map(lambda values: tuple(map(float, values)))


@given(num_units=st.integers(0, 200), shares=shares_of)
def test_every_unit_is_dealt_once_and_close_to_its_share(num_units: int, shares: tuple[float, ...]) -> None:
    counts = deal_units(num_units, shares)
    assert sum(counts) == num_units
    positive = sum(share > 0 for share in shares)
    for count, share in zip(counts, shares, strict=True):
        assert (count == 0) or share > 0
        if share > 0 and num_units >= positive:
            assert count >= 1
        assert abs(count - num_units * share / sum(shares)) <= len(shares)


def test_shares_as_asked() -> None:
    assert deal_units(8, (5.0, 3.0)) == (5, 3)
    assert deal_units(12, (2.0, 1.0, 1.0)) == (6, 3, 3)
    assert deal_units(7, (1.0, 0.0, 1.0)) == (4, 0, 3)
    assert split_size(24, 2, (2.0, 1.0), unit=8).local_sizes == (16, 8)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    shares=shares_of,
    other=st.integers(1, 3),
    dim=st.integers(0, 1),
    seed=st.integers(0, 99),
)
def test_assemble_is_the_inverse_of_take(sizes: list[int], shares: tuple[float, ...], other: int, dim: int, seed: int) -> None:
    part = packed([split_size(size, len(shares), shares) for size in sizes]).checked()
    shape = (part.size, other) if dim == 0 else (other, part.size)
    layout = ShardLayout(shape, dim, part)
    full = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    locals_by_rank = [layout.take(full, rank) for rank in range(len(shares))]
    assert torch.equal(layout.assemble(locals_by_rank), full)
    assert ShardLayout.from_dict(json.loads(json.dumps(layout.as_dict()))) == layout


@settings(deadline=None)
@given(kv=st.integers(1, 6), repeats=st.integers(1, 6), shares=shares_of)
def test_every_query_head_finds_its_kv_head(kv: int, repeats: int, shares: tuple[float, ...]) -> None:
    heads = kv * repeats
    if heads < sum(share > 0 for share in shares):
        with pytest.raises(UsageError, match="cannot occupy"):
            split_heads(heads, kv, 4, len(shares), shares)
        return
    split = split_heads(heads, kv, 4, len(shares), shares)
    split.q.checked()
    split.kv.checked()
    for rank in range(len(shares)):
        queries, keys, group = split.q.indices(rank), split.kv.indices(rank), split.groups[rank]
        assert len(queries) == len(keys) * group
        for position, query in enumerate(queries):
            key = keys[position // group]
            assert key == (query // repeats if query != ZEROS else ZEROS)


def test_kv_heads_are_not_held_twice_while_there_are_enough() -> None:
    assert not split_heads(8, 4, 16, 2, None).replicates_kv
    assert not split_heads(8, 4, 16, 3, (2.0, 1.0, 1.0)).replicates_kv
    few = split_heads(8, 2, 16, 4, None)
    assert [few.kv.indices(rank) for rank in range(4)] == [[0], [0], [1], [1]]
    assert few.groups == (2, 2, 2, 2)
    with pytest.raises(UsageError, match=r"8 attention heads evenly over 3.*\[1, 2, 4, 8\]"):
        split_heads(8, 2, 16, 3, None)


def test_blocks() -> None:
    assert block_sizes(1152, [1, 1, 1, 3, 3]) == [128, 128, 128, 384, 384]
    assert block_sizes(10, [4, 6]) == [4, 6]
    for wrong in ([], [0, 1], [-1, 2], [1.5, 1]):
        with pytest.raises(UsageError, match="positive whole numbers"):
            block_sizes(10, wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="sum 3 do not divide 10"):
        block_sizes(10, [1, 2])


def test_a_hole_is_found() -> None:
    with pytest.raises(UsageError, match="index 2 of 3 is held by no rank"):
        Partition(3, ((Piece(0, 1),), (Piece(1, 1),))).checked()
    assert by_index([[2, 0], [1]], 3).indices(0) == [2, 0]


@given(loads=st.lists(st.floats(0.01, 100), min_size=4, max_size=32), degree=st.integers(2, 4))
def test_experts_are_placed_by_load(loads: list[float], degree: int) -> None:
    owners = place_experts(len(loads), degree, (1.0,) * degree, loads)
    assert sorted(e for rank in owners for e in rank) == list(range(len(loads)))
    assert max(map(len, owners)) - min(map(len, owners)) <= 1
    plain = place_experts(len(loads), degree, (1.0,) * degree)
    # the greedy order may lose to luck on a few experts, but never by more than its bound
    largest = max(loads) / (sum(loads) / degree)
    assert max(relative_loads(owners, loads)) <= max(max(relative_loads(plain, loads)), 4 / 3 + largest)


def test_experts_balance_better_than_in_order() -> None:
    loads = [9.0, 8.0, 7.0, 6.0, 1.0, 1.0, 1.0, 1.0]
    assert max(relative_loads(place_experts(8, 2, None, loads), loads)) < 1.1
    assert max(relative_loads(place_experts(8, 2, None), loads)) > 1.7
    assert [len(e) for e in place_experts(8, 2, (3.0, 1.0), loads)] == [6, 2]
