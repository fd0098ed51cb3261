"""From samples to a `Measurement` and to percentiles. Pure."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Sequence

from shardwise.clock import Clock
from shardwise.machines.profile import Measurement


def measurement(samples: Sequence[float], method: str, clock: Clock) -> Measurement:
    """Median and interquartile range of at least one sample."""
    when = datetime.datetime.fromtimestamp(clock.wall_s(), datetime.UTC).isoformat(timespec="seconds")
    return Measurement(value=statistics.median(samples), spread=spread(samples), n=len(samples), method=method, when=when)


def spread(samples: Sequence[float]) -> float:
    """Interquartile range; 0 for fewer than three samples."""
    return percentile(samples, 0.75) - percentile(samples, 0.25) if len(samples) > 2 else 0.0


def percentile(samples: Sequence[float], share: float) -> float:
    """Linear between the nearest ranks (numpy's default)."""
    ordered = sorted(samples)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
