"""`bench compare A B`: which figures differ, by how much, and whether that is more than noise. Pure.

Each figure is compared over the repetitions of a case: ratio of medians with a bootstrap interval (95 %). A difference
counts only when it leaves the noise, which is the larger of what the repetitions show and `NOISE_FLOOR` (what a busy
home machine does to a median between two runs of the same thing); otherwise it is called noise. With several figures
compared at once the interval is widened (Bonferroni), so that many cases do not make a false alarm likely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from shardwise.bench.parts import Culprit, culprits
from shardwise.bench.result import METRICS, Metric, PartSeries, ResultFile
from shardwise.bench.stats import Interval, bootstrap_ratio, quantile
from shardwise.records import Record

NOISE_FLOOR = 0.10
MIN_REPETITIONS = 3
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


def compare(base: ResultFile, new: ResultFile, *, metrics: Sequence[Metric] = METRICS, floor: float = NOISE_FLOOR) -> Comparison:
    """Compare two runs, case by case."""
    base_cases, new_cases = base.cases(), new.cases()
    shared = [key for key in base_cases if key in new_cases]
    num_looks = max(1, len(shared) * len(metrics))
    differences = [
        _difference(key, metric, base.samples(key, metric.name), new.samples(key, metric.name), floor, num_looks)
        for key in shared
        for metric in metrics
        if base.samples(key, metric.name) and new.samples(key, metric.name)
    ]
    worse = {d.case for d in differences if d.outcome == "worse" and d.metric.startswith("inter_token")}
    blamed = [(key, c) for key in shared if key in worse for c in culprits(pooled_parts(base, key), pooled_parts(new, key))]
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


def _difference(key: str, metric: Metric, old: list[float], new: list[float], floor: float, num_looks: int) -> Difference:
    confidence = 1.0 - 0.05 / num_looks
    ratio = bootstrap_ratio(old, new, confidence=min(confidence, 0.9995))
    noise = max(floor, repeat_noise(old), repeat_noise(new))
    outcome: Outcome
    if min(len(old), len(new)) < MIN_REPETITIONS:
        outcome = "unknown" if abs(ratio.value - 1) > noise else "noise"
    elif not math.isfinite(ratio.value) or ratio.low <= 1.0 <= ratio.high or abs(ratio.value - 1) <= noise:
        outcome = "noise"
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
    for name, version in base.environment.versions.items():
        other = new.environment.versions.get(name)
        if other != version:
            found.append(f"{name} is {version} in the base and {other or 'absent'} in the new run")
    for result in (base, new):
        if result.environment.load_1min > result.environment.num_cores:
            found.append(f"{result.name} started on a busy machine (load {result.environment.load_1min:.1f})")
    return found
