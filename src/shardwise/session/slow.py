"""Which stage has become slow, against its own history and against the others. Pure: figures in, findings out.

The mean time of a decode step between two looks is compared with the median of that stage's earlier looks. A stage is slow
when it takes `FACTOR` times as long as it did, for `LOOKS` looks in a row, and the other stages do not: where all become slow
(more sessions, longer contexts) nobody is. A predicted time, where there is one, is history from the beginning.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from shardwise.records import Record
from shardwise.transport.messages import Stats

FACTOR = 2.5
LOOKS = 3
HISTORY_LOOKS = 20
LEAST_HISTORY = 3
LEAST_STEPS = 10  # in a look, to count


class SlowStage(Record):
    """One finding. `ratio`: its time now over its time before."""

    stage: int
    step_s: float
    usual_s: float

    @property
    def ratio(self) -> float:
        return self.step_s / self.usual_s

    def sentence(self) -> str:
        """For logs and reports."""
        now, usual = 1000 * self.step_s, 1000 * self.usual_s
        return f"stage {self.stage} takes {now:.1f} ms a step, {self.ratio:.1f} times its usual {usual:.1f}"


class SlowWatch:
    """Remembers the looks at a deployment's stages."""

    def __init__(self, predicted_s: Mapping[int, float] | None = None) -> None:
        self._usual: dict[int, deque[float]] = {}
        self._seen: dict[int, tuple[int, float]] = {}
        self._slow_looks: dict[int, int] = {}
        for stage, seconds in (predicted_s or {}).items():
            self._usual[stage] = deque([seconds] * LEAST_HISTORY, maxlen=HISTORY_LOOKS)

    def take(self, figures: Mapping[int, Stats]) -> list[SlowStage]:
        """One look; the stages that are slow now."""
        now_s = {stage: step_s for stage, found in figures.items() if (step_s := self._step_s(stage, found)) is not None}
        ratios = {stage: step_s / usual for stage, step_s in now_s.items() if (usual := self._usual_s(stage)) is not None}
        slow: list[SlowStage] = []
        for stage, step_s in now_s.items():
            others = [ratio for other, ratio in ratios.items() if other != stage]
            company = statistics.median(others) if others else 1.0
            usual_s = self._usual_s(stage)
            if usual_s is None or step_s < FACTOR * usual_s * max(1.0, company):
                self._slow_looks[stage] = 0
                self._usual.setdefault(stage, deque(maxlen=HISTORY_LOOKS)).append(step_s)
                continue
            self._slow_looks[stage] = self._slow_looks.get(stage, 0) + 1
            if self._slow_looks[stage] >= LOOKS:
                slow.append(SlowStage(stage=stage, step_s=step_s, usual_s=usual_s))
        return slow

    def _step_s(self, stage: int, figures: Stats) -> float | None:
        """Mean of the steps since the last look; None where there were too few, or the figures began anew."""
        n, total = figures.decode.n, figures.decode.total
        before_n, before_total = self._seen.get(stage, (0, 0.0))
        self._seen[stage] = (n, total)
        steps = n - before_n
        return (total - before_total) / steps if steps >= LEAST_STEPS and total >= before_total else None

    def _usual_s(self, stage: int) -> float | None:
        known = self._usual.get(stage, ())
        return statistics.median(known) if len(known) >= LEAST_HISTORY else None


def rebalanced(layers: list[int], step_s: Mapping[int, float]) -> tuple[int, ...]:
    """Layers of each stage in proportion to its present speed, so that all take about as long; each keeps one at least."""
    speed = [count / step_s[stage] for stage, count in enumerate(layers)]
    total, num_layers = sum(speed), sum(layers)
    counts = [max(1, int(num_layers * one / total)) for one in speed]
    while (rest := num_layers - sum(counts)) != 0:
        times = [count / one for count, one in zip(counts, speed, strict=True)]
        if rest > 0:
            best = min(range(len(counts)), key=lambda i: (counts[i] + 1) / speed[i])
            counts[best] += 1
        else:
            worst = max((i for i in range(len(counts)) if counts[i] > 1), key=lambda i: times[i])
            counts[worst] -= 1
    return tuple(counts)
