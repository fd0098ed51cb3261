"""`bench compare A B`: which figures differ, by how much, and whether that is more than noise. Pure.

Each figure is compared over the repetitions of a case: ratio of medians with a bootstrap interval. A difference counts only
when all of this holds, otherwise it is called noise:

- every repetition of one side is beyond every one of the other;
- it is larger than the two-sided t interval of the logarithms (1 % for all cases together, Bonferroni), with the larger of
  the case's own spread and the spread pooled over all cases, because three repetitions may be alike by chance;
- it is larger than `NOISE_FLOOR`, what a home machine does to a median between two runs of the same thing;
- it is larger than what the machine itself may have done: the ratio of its busyness (a fixed piece of computing timed beside
  each trial, times processes a core) in the two runs, squared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from shardwise.bench.parts import Culprit, culprits
from shardwise.bench.result import METRICS, Metric, PartSeries, ResultFile, TrialResult
from shardwise.bench.stats import Interval, bootstrap_ratio, quantile, student_t_quantile
from shardwise.records import Record

NOISE_FLOOR = 0.10
MIN_REPETITIONS = 3
ALARM = 0.01  # chance that a comparison of two equal runs names any case, per metric
Outcome = Literal["better", "worse", "noise", "unknown"]


class Difference(Record):
    """One figure of one case in both runs."""

    case: str
    metric: str
    base: float
    new: float
    ratio: Interval
    noise: float
    outcome: Outcome

    def sentence(self) -> str:
        """In plain words."""
        change = f"{self.ratio.value - 1:+.1%} ({self.ratio.low - 1:+.1%} to {self.ratio.high - 1:+.1%})"
        words = {"better": "better", "worse": "worse", "noise": "inside the noise", "unknown": "too few repetitions to say"}
        return f"{self.case}: {self.metric} {change}, {words[self.outcome]}"


class Comparison(Record):
    """Everything that could be compared, and what only one side has."""

    base: str
    new: str
    differences: tuple[Difference, ...]
    culprits: tuple[tuple[str, Culprit], ...]
    only_base: tuple[str, ...] = ()
    only_new: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def regressions(self) -> list[Difference]:
        return [difference for difference in self.differences if difference.outcome == "worse"]


def repeat_noise(samples: Sequence[float]) -> float:
    """How much repetitions of the same case differ: range over median (for few repetitions the safest figure)."""
    middle = quantile(samples, 0.5)
    return (max(samples) - min(samples)) / middle if len(samples) > 1 and middle else 0.0


class _Yardstick:
    """What counts as noise for one metric: pooled over all cases of both runs."""

    def __init__(self, pairs: dict[str, tuple[list[float], list[float]]]) -> None:
        groups = [[math.log(v) for v in side if v > 0] for pair in pairs.values() for side in pair]
        squares = [sum((v - statistics.fmean(group)) ** 2 for v in group) for group in groups if len(group) > 1]
        self._df = sum(len(group) - 1 for group in groups if len(group) > 1)
        self._pooled = math.sqrt(sum(squares) / self._df) if self._df else 0.0
        self._share = 1.0 - ALARM / max(1, len(pairs)) / 2

    def noise(self, old: list[float], new: list[float]) -> float:
        """Half width of the t interval, as a share."""
        own_df = len(old) + len(new) - 2
        if own_df < 1 or min(*old, *new) <= 0:
            return 0.0
        squares = sum((math.log(v) - statistics.fmean(map(math.log, side))) ** 2 for side in (old, new) for v in side)
        own = math.sqrt(squares / own_df)
        spread, df = (own, own_df) if own > self._pooled else (self._pooled, self._df)
        width = student_t_quantile(self._share, df) * spread * math.sqrt(1 / len(old) + 1 / len(new))
        return math.expm1(min(width, 50.0))


def compare(base: ResultFile, new: ResultFile, *, metrics: Sequence[Metric] = METRICS, floor: float = NOISE_FLOOR) -> Comparison:
    """Compare two runs, case by case."""
    base_cases, new_cases = base.cases(), new.cases()
    shared = [key for key in base_cases if key in new_cases]
    differences: list[Difference] = []
    for metric in metrics:
        pairs = {key: (base.samples(key, metric.name), new.samples(key, metric.name)) for key in shared}
        pairs = {key: pair for key, pair in pairs.items() if pair[0] and pair[1]}
        yardstick = _Yardstick(pairs)
        for key, (old, fresh) in pairs.items():
            drift = _machine_drift(
                _busyness(base_cases[key], base.environment.num_cores), _busyness(new_cases[key], new.environment.num_cores)
            )
            noise = max(floor, yardstick.noise(old, fresh), drift)
            differences.append(_difference(key, metric, old, fresh, noise))
    worse = {d.case for d in differences if d.outcome == "worse" and d.metric.startswith("inter_token")}
    blamed = [(key, c) for key in shared if key in worse for c in culprits(base_cases[key], new_cases[key])]
    return Comparison(
        base=base.name,
        new=new.name,
        differences=tuple(differences),
        culprits=tuple(blamed),
        only_base=tuple(key for key in base_cases if key not in new_cases),
        only_new=tuple(key for key in new_cases if key not in base_cases),
        warnings=tuple(_warnings(base, new)),
    )


def pooled_parts(result: ResultFile, key: str) -> list[PartSeries]:
    """The parts of all repetitions of a case together."""
    pooled: dict[tuple[str, str], list[float]] = {}
    for trial in result.cases().get(key, []):
        for part in trial.parts:
            pooled.setdefault((part.kind, part.where), []).extend(part.seconds)
    return [PartSeries(kind=kind, where=where, seconds=tuple(values)) for (kind, where), values in pooled.items()]  # type: ignore[arg-type]


def _busyness(trials: Sequence[TrialResult], num_cores: int) -> float:
    """How busy the machine was: a fixed piece of computing, times how many processes shared a core; 0 = not known."""
    values = [trial.machine_s * max(1.0, trial.load_1min / num_cores) for trial in trials if trial.machine_s]
    return quantile(values, 0.5) if values else 0.0


def _machine_drift(old: float, new: float) -> float:
    """What a difference in busyness may do to a figure, as a share. Squared, because waiting for a core hits tails twice:
    a token waits once a stage, and the longest of many waits grows faster than the mean."""
    return (max(old, new) / min(old, new)) ** 2 - 1.0 if old and new else 0.0


def _difference(key: str, metric: Metric, old: list[float], new: list[float], noise: float) -> Difference:
    ratio = bootstrap_ratio(old, new)
    size = max(ratio.value, 1 / ratio.value) - 1 if ratio.value > 0 else math.inf
    apart = max(old) < min(new) or max(new) < min(old)
    outcome: Outcome
    if not math.isfinite(ratio.value) or size <= noise or not apart:
        outcome = "noise"
    elif min(len(old), len(new)) < MIN_REPETITIONS:
        outcome = "unknown"
    else:
        outcome = "worse" if (ratio.value > 1) == (metric.better == "lower") else "better"
    return Difference(
        case=key,
        metric=metric.name,
        base=quantile(old, 0.5),
        new=quantile(new, 0.5),
        ratio=ratio,
        noise=noise,
        outcome=outcome,
    )


def _warnings(base: ResultFile, new: ResultFile) -> list[str]:
    found = []
    if base.scenario_digest != new.scenario_digest:
        found.append("the two runs measured different scenarios or seeds; only equal cases are compared")
    if base.environment.cpu != new.environment.cpu:
        found.append(f"different processors: {base.environment.cpu} and {new.environment.cpu}")
    if base.environment.lab != new.environment.lab:
        found.append(f"virtual homes made differently: {base.environment.lab} and {new.environment.lab}")
    for name, version in base.environment.versions.items():
        other = new.environment.versions.get(name)
        if other != version:
            found.append(f"{name} is {version} in the base and {other or 'absent'} in the new run")
    for result in (base, new):
        if result.environment.load_1min > result.environment.num_cores:
            found.append(f"{result.name} started on a busy machine (load {result.environment.load_1min:.1f})")
    return found
