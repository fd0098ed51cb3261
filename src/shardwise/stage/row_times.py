"""Whether decode rows of several sessions go through a stage together or one after another: learned from its own steps. Pure.

Where reading the weights is what takes time (a GPU, a large model), rows share it and belong together. Where arithmetic is
(small models on a CPU), they gain nothing, and some kernels are even slower for a few rows than for one (llama.cpp, Q8_0 on
AVX-512: the sample's output matrix takes 1.0 ms for one row, 5.2 ms for two).

**Promises** each number of rows and single rows are tried `TRIES` times before they are compared by the best of their latest
times, and what lost is tried again after `AGAIN` steps. **Called by** the batcher, where results may depend on company.
"""

from __future__ import annotations

from collections import deque

TRIES = 3  # a step whose shape differs from the last one's pays for a new graph: the first says little
KEPT = 4
AGAIN = 400
GAIN = 0.97  # together only where that takes this share of one after another, at most


class RowTimes:
    """Seconds of decode steps by their number of rows."""

    def __init__(self) -> None:
        self._latest_s: dict[int, deque[float]] = {}
        self._since: dict[int, int] = {}  # steps since rows of that number were tried

    def add(self, rows: int, seconds: float) -> None:
        """A decode step was computed."""
        self._latest_s.setdefault(rows, deque(maxlen=KEPT)).append(seconds)
        for other in self._since:
            self._since[other] += 1
        self._since[rows] = 0

    def rows_of_next(self, waiting: int) -> int:
        """How many of the rows that wait, and may go together, should."""
        if waiting <= 1 or self._is_due(waiting):
            return waiting
        if self._is_due(1):
            return 1
        return waiting if min(self._latest_s[waiting]) <= GAIN * waiting * min(self._latest_s[1]) else 1

    def _is_due(self, rows: int) -> bool:
        known = self._latest_s.get(rows)
        if known is None or len(known) < TRIES:
            return True
        if self._since[rows] > AGAIN:
            known.clear()
            return True
        return False
