"""How long this deployment's steps take: its own history, from which a step's deadline follows. Pure.

Gaps between two tokens of a session flow in, a deadline flows out: `SUSPECT_FACTOR` times the 99th percentile, because a stage
that should take 8 ms is suspect long before 30 s. **Called by** the driver (`add`) and the supervisor (`deadline_s`).
"""

from __future__ import annotations

from collections import deque

SUSPECT_FACTOR = 10.0
LEAST_STEPS = 20  # before that nothing is known
LEAST_DEADLINE_S = 0.1
_KEPT = 512


class StepHistory:
    """The latest gaps between tokens."""

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=_KEPT)

    def add(self, gap_s: float) -> None:
        """One token followed another without a fault between."""
        self._gaps_s.append(gap_s)

    @property
    def deadline_s(self) -> float:
        """After this a step is overdue; infinite as long as too little is known."""
        if len(self._gaps_s) < LEAST_STEPS:
            return float("inf")
        ordered = sorted(self._gaps_s.copy())
        return max(LEAST_DEADLINE_S, SUSPECT_FACTOR * ordered[int(0.99 * (len(ordered) - 1))])
