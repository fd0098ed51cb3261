"""The statistics of the room, pure: quantiles, bootstrap intervals, the Kolmogorov-Smirnov test.

Sources: Efron & Tibshirani, "An Introduction to the Bootstrap", ch. 13 (percentile interval); Massey, JASA 46 (1951)
and the asymptotic Kolmogorov distribution for the KS p-value.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from shardwise.records import Record


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the samples lie, linear between neighbours; NaN for none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


class Spread(Record):
    """A series in four figures; `spread` is the interquartile range as a share of the median."""

    n: int
    p50: float
    p95: float
    p99: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """From samples; all zero for none."""
        if not values:
            return cls(n=0, p50=0.0, p95=0.0, p99=0.0, spread=0.0)
        middle = quantile(values, 0.5)
        width = quantile(values, 0.75) - quantile(values, 0.25)
        return cls(
            n=len(values),
            p50=middle,
            p95=quantile(values, 0.95),
            p99=quantile(values, 0.99),
            spread=width / middle if middle else 0.0,
        )


class Interval(Record):
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float


def bootstrap_ratio(
    base: Sequence[float], new: Sequence[float], *, confidence: float = 0.95, num_draws: int = 2000, seed: int = 0
) -> Interval:
    """`median(new) / median(base)` with a percentile bootstrap interval, each side resampled on its own."""
    rng = np.random.default_rng(seed)
    below, above = (
        np.median(np.asarray(side)[rng.integers(0, len(side), (num_draws, len(side)))], axis=1) for side in (base, new)
    )
    ratios = np.where(below > 0, above / np.where(below > 0, below, 1.0), math.inf)
    rest = (1.0 - confidence) / 2
    low, high = np.quantile(ratios, [rest, 1.0 - rest])
    bottom = statistics.median(base)
    return Interval(value=statistics.median(new) / bottom if bottom else math.inf, low=float(low), high=float(high))


def ks_distance(samples: Sequence[float], cdf: Callable[[float], float]) -> float:
    """The largest gap between the samples' distribution and `cdf`."""
    ordered, n = sorted(samples), len(samples)
    return max(max((i + 1) / n - cdf(x), cdf(x) - i / n) for i, x in enumerate(ordered))


def ks_p_value(distance: float, n: int) -> float:
    """Probability of a gap at least that large if the samples do come from the distribution."""
    root = math.sqrt(n)
    scaled = (root + 0.12 + 0.11 / root) * distance
    total = sum((-1) ** (k - 1) * math.exp(-2.0 * (k * scaled) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, 2.0 * total)) if scaled > 0.2 else 1.0


@cache
def student_t_quantile(share: float, df: int) -> float:
    """The value below which `share` (above 0.5) of Student's t lies; bisection over Simpson's rule, 1e-4 relative."""
    scale = float(math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi))

    def below(at: float) -> float:
        steps = 400
        width = at / steps
        weights = (1 if i in (0, steps) else 4 if i % 2 else 2 for i in range(steps + 1))
        total = math.fsum(w * (1 + (i * width) ** 2 / df) ** (-(df + 1) / 2) for i, w in enumerate(weights))
        return float(0.5 + scale * total * width / 3)

    low, high = 0.0, 1.0
    while below(high) < share and high < 1e4:
        high *= 2
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < share else (low, middle)
    return high
