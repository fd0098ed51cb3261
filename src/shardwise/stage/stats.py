"""A worker's figures: bounded samples of durations, counters."""

from __future__ import annotations

from shardwise.transport.messages import Quantiles

MAX_SAMPLES = 4096


class Samples:
    """Durations in seconds: all are counted, the last `MAX_SAMPLES` give the quantiles."""

    def __init__(self) -> None:
        self.n = 0
        self.total = 0.0
        self._ring: list[float] = []

    def add(self, value_s: float) -> None:
        if len(self._ring) < MAX_SAMPLES:
            self._ring.append(value_s)
        else:
            self._ring[self.n % MAX_SAMPLES] = value_s
        self.n += 1
        self.total += value_s

    def quantiles(self) -> Quantiles:
        if not self._ring:
            return Quantiles()
        ordered = sorted(self._ring)

        def at(share: float) -> float:
            return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

        return Quantiles(n=self.n, total=self.total, p50=at(0.5), p95=at(0.95), p99=at(0.99), max=ordered[-1])


class WorkerFigures:
    """Everything a worker counts between two resets."""

    def __init__(self) -> None:
        self.prefill, self.decode, self.wait = Samples(), Samples(), Samples()
        self.queue, self.transfer, self.copy = Samples(), Samples(), Samples()
        self.decode_rows = self.prefill_tokens = 0
        self.decode_sent_bytes = self.decode_steps_sent = 0
        self.num_duplicates = self.num_fenced = 0
