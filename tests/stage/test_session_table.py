"""Sessions of a stage: a close may overtake the opening, which travels through the stages."""

from __future__ import annotations

from shardwise.stage.sessions import MAX_REMEMBERED, SessionTable


def test_a_session_that_was_closed_first_stays_closed() -> None:
    table = SessionTable(2)
    assert not table.is_over(7)
    table.end(7)
    assert table.is_over(7)
    assert not table.is_over(8)


def test_what_is_remembered_is_bounded() -> None:
    table = SessionTable(2)
    for number in range(MAX_REMEMBERED + 10):
        table.end(number)
    assert not table.is_over(9)
    assert table.is_over(MAX_REMEMBERED + 9)
