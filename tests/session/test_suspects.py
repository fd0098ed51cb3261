"""Which session ends when stages are lost again and again; pure, so whole histories can be written down."""

from __future__ import annotations

import itertools

import pytest

from shardwise.session.recovery import Cause
from shardwise.session.suspects import MOST_LOSSES, Suspects, may_be_a_session


def run(guilty: set[int], sessions: list[int], *, most: int = 50) -> tuple[set[int], dict[int, int], int]:
    """Sessions are opened again after every loss; a guilty one stops everything before its token. Returns who ended, the tokens
    of the others, and the losses it took until everybody else had three tokens."""
    suspects, ended, tokens = Suspects(), set[int](), dict.fromkeys(sessions, 0)
    for losses in range(most):
        suspects.paused()
        held = [n for n in sessions if n not in ended and tokens[n] < 3]
        running: list[int] = []
        while opened := suspects.admit(held):
            held = [n for n in held if n not in opened]
            running += opened
            for number in opened:
                suspects.opened(number)
            if guilty & set(running):
                break
            for number in running:
                tokens[number] += 1
                suspects.token(number)
        if not guilty & set(running):
            while any(tokens[n] < 3 for n in running):
                for number in running:
                    tokens[number] += 1
        if all(tokens[n] >= 3 for n in sessions if n not in ended):
            return ended, {n: tokens[n] for n in sessions if n not in guilty}, losses
        for number in suspects.lost():
            ended.add(number)
            suspects.over(number)
    raise AssertionError("it never ends")


@pytest.mark.parametrize("guilty", [set(c) for k in (0, 1, 2) for c in itertools.combinations(range(1, 5), k)], ids=str)
def test_the_guilty_end_and_nobody_else(guilty: set[int]) -> None:
    ended, tokens, losses = run(guilty, [1, 2, 3, 4])
    assert ended == guilty
    assert all(count >= 3 for count in tokens.values())
    assert losses <= 2 + 2 * len(guilty)


def test_a_session_alone_ends_at_the_third_loss() -> None:
    assert run({1}, [1]) == ({1}, {}, MOST_LOSSES)


def test_a_token_between_takes_the_losses_away() -> None:
    suspects = Suspects()
    for _ in range(10):
        suspects.opened(1)
        assert suspects.lost() == []
        suspects.opened(1)
        suspects.token(1)


def test_several_losses_before_a_session_is_opened_again_are_one() -> None:
    suspects = Suspects()
    suspects.opened(1)
    for _ in range(10):
        assert suspects.lost() == []


def test_what_waits_goes_on_when_the_suspect_has_ended() -> None:
    suspects = Suspects()
    for _ in range(2):
        for number in (1, 2):
            suspects.opened(number)
        suspects.lost()
    assert suspects.admit([1, 2, 3]) == [1]
    suspects.opened(1)
    assert suspects.admit([2, 3]) == []
    suspects.over(1)
    assert suspects.admit([2, 3]) == [2]
    suspects.opened(2)
    assert suspects.token(2)
    assert suspects.admit([3]) == [3]


def test_only_what_a_step_can_do_is_blamed() -> None:
    assert may_be_a_session(f"{Cause.STUCK}: no progress for 6.0 s")
    assert may_be_a_session("crashed: worker ended with signal 9: no output")
    assert not may_be_a_session("stopped: its system says so")
    assert not may_be_a_session("corrupt: digest")
    assert not may_be_a_session("")
