"""How long a recovery will hold sessions up, predicted from measured times. Pure.

Detection + process start and load (as the stage's worker took the last time) + refill: every row of every open session at the
stage's own measured compute time (prefill per token, decode per step), as an exact refill computes them. A replay through all
stages is pipelined: it takes the slowest stage's time for all rows, and each row's way through the others once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardwise.records import Record
from shardwise.transport.messages import Stats


class SessionRows(Record):
    """What a session has computed."""

    prompt_tokens: int
    generated_tokens: int


class Refill(Record):
    """Predicted seconds of compute."""

    exact_s: float  # the lost stage alone, in the old shapes
    replay_s: float  # all stages, in the old shapes
    fast_s: float  # all stages, everything in chunks


def refill_times(stage: int, figures: Mapping[int, Stats], sessions: Iterable[SessionRows]) -> Refill:
    """Seconds for the rows of these sessions; zeros where nothing was measured yet."""
    rows = list(sessions)
    exact = {index: sum(_exact_s(found, one) for one in rows) for index, found in figures.items()}
    fast = {index: sum(_prefill_s(found, r.prompt_tokens + r.generated_tokens) for r in rows) for index, found in figures.items()}
    passing_s = sum(found.decode.p50 for found in figures.values())
    return Refill(
        exact_s=exact.get(stage, max(exact.values(), default=0.0)),
        replay_s=max(exact.values(), default=0.0) + passing_s,
        fast_s=max(fast.values(), default=0.0) + passing_s,
    )


def _prefill_s(figures: Stats, num_tokens: int) -> float:
    """From chunks where some were measured, else row by row."""
    if figures.prefill_tokens:
        return figures.prefill.total / figures.prefill_tokens * num_tokens
    return figures.decode.p50 * num_tokens


def _exact_s(figures: Stats, rows: SessionRows) -> float:
    return _prefill_s(figures, rows.prompt_tokens) + figures.decode.p50 * rows.generated_tokens
