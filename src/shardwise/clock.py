"""The only source of time and sleep. Tests and `swarm` bring a virtual one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from."""

    def now_s(self) -> float:
        """Seconds on a monotonic scale; only differences mean something."""
        ...

    def wall_s(self) -> float:
        """Seconds since the epoch, for records that people read."""
        ...

    def sleep(self, duration_s: float) -> None:
        """Wait; negative durations return at once."""
        ...


class SystemClock:
    """The clock of the operating system."""

    def now_s(self) -> float:
        return time.perf_counter()

    def wall_s(self) -> float:
        return time.time()

    def sleep(self, duration_s: float) -> None:
        if duration_s > 0:
            time.sleep(duration_s)


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s

    def sleep(self, duration_s: float) -> None:
        self._now_s += max(0.0, duration_s)
