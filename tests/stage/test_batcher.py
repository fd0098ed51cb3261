"""Which rows a stage computes next."""

from __future__ import annotations

from shardwise.stage.batcher import DECODE_TURNS, Batcher, Item
from shardwise.transport.messages import Segment


def item(session: int, position: int = 0, num_tokens: int = 1, *, sample: bool = True) -> Item:
    segment = Segment(session=session, epoch=0, position=position, num_tokens=num_tokens, sample=sample)
    return Item(segment, None, (0,) * num_tokens, 0.0)


def ids(batch: list[Item]) -> list[tuple[int, int]]:
    return [(i.segment.session, i.segment.position) for i in batch]


def batcher(num_stages: int = 2, max_rows: int = 8, deterministic: bool = False) -> Batcher:
    return Batcher(num_stages=num_stages, max_rows=max_rows, deterministic=deterministic)


def test_decode_goes_before_prefill() -> None:
    b = batcher()
    b.add(item(1, 0, 64))
    b.add(item(2, 9))
    assert ids(b.next_batch(active_sessions=2, prefill_allowed=True)) == [(2, 9)]
    assert ids(b.next_batch(active_sessions=2, prefill_allowed=True)) == [(1, 0)]
    assert b.next_batch(active_sessions=2, prefill_allowed=True) == []


def test_a_prompt_is_not_starved() -> None:
    b = batcher()
    b.add(item(1, 0, 64))
    for n in range(DECODE_TURNS):
        b.add(item(2, n))
        assert ids(b.next_batch(active_sessions=2, prefill_allowed=True)) == [(2, n)]
    b.add(item(2, 99))
    assert ids(b.next_batch(active_sessions=2, prefill_allowed=True)) == [(1, 0)]


def test_two_users_on_two_stages_travel_apart_and_eight_in_fours() -> None:
    b = batcher(num_stages=2)
    for session in range(2):
        b.add(item(session))
    assert len(b.next_batch(active_sessions=2, prefill_allowed=True)) == 1
    for session in range(2, 9):
        b.add(item(session))
    assert len(b.next_batch(active_sessions=8, prefill_allowed=True)) == 4


def test_deterministic_keeps_every_session_apart() -> None:
    b = batcher(num_stages=1, deterministic=True)
    for session in range(4):
        b.add(item(session))
    assert [len(b.next_batch(active_sessions=4, prefill_allowed=True)) for _ in range(4)] == [1] * 4


def test_rows_of_one_session_never_share_a_batch_and_keep_their_order() -> None:
    b = batcher(num_stages=1)
    for session, position in ((1, 0), (1, 1), (2, 0), (1, 2), (2, 1)):
        b.add(item(session, position))
    order = []
    while batch := b.next_batch(active_sessions=8, prefill_allowed=True):
        sessions = [i.segment.session for i in batch]
        assert len(set(sessions)) == len(sessions)
        order += ids(batch)
    assert [p for s, p in order if s == 1] == [0, 1, 2]
    assert [p for s, p in order if s == 2] == [0, 1]


def test_forced_rows_stay_behind_their_prompt() -> None:
    """A replay: chunk, then single rows without and with sampling; none may overtake another."""
    b = batcher()
    b.add(item(1, 0, 64, sample=False))
    b.add(item(1, 64, sample=False))
    b.add(item(1, 65, sample=True))
    order = [ids(b.next_batch(active_sessions=1, prefill_allowed=True)) for _ in range(3)]
    assert order == [[(1, 0)], [(1, 64)], [(1, 65)]]


def test_no_room_downstream_holds_prefill_only() -> None:
    b = batcher()
    b.add(item(1, 0, 64))
    assert b.next_batch(active_sessions=1, prefill_allowed=False) == []
    b.add(item(2, 5))
    assert ids(b.next_batch(active_sessions=2, prefill_allowed=False)) == [(2, 5)]


def test_discard_forgets_a_session() -> None:
    b = batcher()
    for session in (1, 2):
        b.add(item(session, 0, 64))
        b.add(item(session, 64))
    b.discard(lambda segment: segment.session != 1)
    assert len(b) == 2
    assert {s for s, _ in ids(b.next_batch(active_sessions=1, prefill_allowed=True))} == {2}
