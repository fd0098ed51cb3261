"""Rows go together where that is faster, and one by one where it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwise.stage.row_times import AGAIN, TRIES, RowTimes


def drive(times: RowTimes, waiting: int, cost: Callable[[int], float], steps: int) -> list[int]:
    chosen = []
    for _ in range(steps):
        rows = times.rows_of_next(waiting)
        times.add(rows, cost(rows))
        chosen.append(rows)
    return chosen


def test_shared_reads_keep_rows_together() -> None:
    chosen = drive(RowTimes(), 4, lambda rows: 10.0 + 0.5 * rows, 100)
    assert chosen[:TRIES] == [4] * TRIES
    assert chosen[2 * TRIES :] == [4] * (100 - 2 * TRIES)


def test_arithmetic_lets_them_go_one_by_one() -> None:
    chosen = drive(RowTimes(), 2, lambda rows: {1: 4.1, 2: 9.2}[rows], 100)
    assert chosen[2 * TRIES :] == [1] * (100 - 2 * TRIES)


def test_one_slow_step_decides_nothing() -> None:
    costs = iter([50.0, 50.0])
    chosen = drive(RowTimes(), 2, lambda rows: next(costs, 5.0 + rows), 50)
    assert chosen[-1] == 2


def test_what_lost_is_tried_again_and_wins_when_things_have_changed() -> None:
    times = RowTimes()
    assert drive(times, 2, lambda rows: {1: 4.0, 2: 9.0}[rows], 50)[-1] == 1
    assert drive(times, 2, lambda rows: {1: 4.0, 2: 5.0}[rows], AGAIN + 20)[-1] == 2


@pytest.mark.parametrize("waiting", [0, 1])
def test_nothing_to_choose(waiting: int) -> None:
    assert RowTimes().rows_of_next(waiting) == waiting
