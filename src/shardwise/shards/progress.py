"""How far a transfer is, how fast, how long still; and holding it back to a rate. Safe from several threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from shardwise.clock import Clock
from shardwise.records import Record
from shardwise.units import format_bytes, format_duration, format_rate

_WINDOW_S = 5.0
_REPORT_EVERY_S = 0.1


class TransferProgress(Record):
    """`left_s` is None until a rate is known."""

    done_bytes: int
    total_bytes: int
    bytes_per_s: float
    left_s: float | None

    def line(self) -> str:
        """`1.20 GiB of 4.00 GiB, 110 MB/s, 27 s left`."""
        left = f", {format_duration(self.left_s)} left" if self.left_s is not None else ""
        done, total = format_bytes(self.done_bytes), format_bytes(self.total_bytes)
        return f"{done} of {total}, {format_rate(self.bytes_per_s)}{left}"


OnTransfer = Callable[[TransferProgress], None]


class ProgressMeter:
    """Counts bytes and reports at most ten times a second, and once at the end."""

    def __init__(self, total_bytes: int, report: OnTransfer | None, clock: Clock) -> None:
        self._total_bytes = total_bytes
        self._report = report
        self._clock = clock
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._samples: deque[tuple[float, int]] = deque([(clock.now_s(), 0)])
        self._reported_s = float("-inf")

    def add(self, num_bytes: int) -> None:
        """So many more are here (negative: were thrown away)."""
        with self._lock:
            self._done_bytes += num_bytes
            now_s = self._clock.now_s()
            self._samples.append((now_s, self._done_bytes))
            while len(self._samples) > 2 and now_s - self._samples[0][0] > _WINDOW_S:
                self._samples.popleft()
            if self._report is None or (now_s - self._reported_s < _REPORT_EVERY_S and self._done_bytes < self._total_bytes):
                return
            self._reported_s = now_s
            progress = self._now()
            self._report(progress)

    def _now(self) -> TransferProgress:
        (first_s, first_bytes), (last_s, last_bytes) = self._samples[0], self._samples[-1]
        rate = max(0.0, (last_bytes - first_bytes) / (last_s - first_s)) if last_s > first_s else 0.0
        left_s = (self._total_bytes - self._done_bytes) / rate if rate > 0 else None
        return TransferProgress(done_bytes=self._done_bytes, total_bytes=self._total_bytes, bytes_per_s=rate, left_s=left_s)


class RateLimit:
    """Spaces reads so that together they do not exceed a rate; None = no limit."""

    def __init__(self, bytes_per_s: float | None, clock: Clock) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_s = clock.now_s()

    def take(self, num_bytes: int) -> None:
        """Wait until so many may be read."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now_s = self._clock.now_s()
            start_s = max(now_s, self._free_s)
            self._free_s = start_s + num_bytes / self._bytes_per_s
        self._clock.sleep(start_s - now_s)
