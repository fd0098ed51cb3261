"""Where a token's time goes, and which part of a slower run is to blame. Pure.

A token's time runs from its arrival at stage 0 to the next token's arrival there: once around the ring. On the common
clock its parts follow each other without a gap, so their sum is the measured time:

    per stage      queue = started - received, compute = computed - started, copy = sent - computed
    per boundary   transfer = received(next) - sent; the last boundary is the ring's way back to stage 0
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from shardwise.bench.result import ClockOffset, PartSeries, StageVisit, TokenTrace, TrialResult
from shardwise.bench.stats import Interval, bootstrap_ratio, quantile
from shardwise.records import Record

_NOISE_S = 20e-6  # below this a part is not worth naming
_STEADY = 0.25  # how far the base's repetitions may lie apart, as a share of the difference, for medians to be trusted


def boundary_name(source: str, target: str) -> str:
    """`from>to`."""
    return f"{source}>{target}"


def token_parts(traces: Sequence[TokenTrace], nodes: Sequence[str]) -> tuple[PartSeries, ...]:
    """The parts of every token whose successor is traced too. `nodes`: the host of each stage."""
    by_user: dict[int, list[TokenTrace]] = {}
    for trace in traces:
        by_user.setdefault(trace.user, []).append(trace)
    series: dict[tuple[str, str], list[float]] = {}
    for tokens in by_user.values():
        ordered = sorted(tokens, key=lambda trace: trace.number)
        for this, following in itertools.pairwise(ordered):
            if following.number == this.number + 1 and len(this.visits) == len(nodes) == len(following.visits):
                for key, seconds in _parts_of(this.visits, following.visits[0], nodes):
                    series.setdefault(key, []).append(round(seconds, 8))
    return tuple(PartSeries(kind=key[0], where=key[1], seconds=tuple(values)) for key, values in series.items())  # type: ignore[arg-type]


def _parts_of(visits: Sequence[StageVisit], following: StageVisit, nodes: Sequence[str]) -> list[tuple[tuple[str, str], float]]:
    found: list[tuple[tuple[str, str], float]] = []
    for number, visit in enumerate(visits):
        label = stage_label(number, nodes)
        found.append((("queue", label), visit.started_s - visit.received_s))
        found.append((("compute", label), visit.computed_s - visit.started_s))
        found.append((("copy", label), visit.sent_s - visit.computed_s))
        last = number == len(visits) - 1
        arrival_s = following.received_s if last else visits[number + 1].received_s
        target = stage_label(0 if last else number + 1, nodes)
        found.append((("transfer", boundary_name(label, target)), arrival_s - visit.sent_s))
    return found


def stage_label(number: int, nodes: Sequence[str]) -> str:
    """The host's name; with the stage's number where a host holds several."""
    name = nodes[number] or f"stage {number}"
    return f"{name}#{number}" if list(nodes).count(nodes[number]) > 1 and nodes[number] else name


def to_common_clock(traces: Sequence[TokenTrace], offsets: Sequence[ClockOffset], nodes: Sequence[str]) -> tuple[TokenTrace, ...]:
    """Stage times moved to the driver's clock by the estimated offsets."""
    ahead = {offset.node: offset.offset_s for offset in offsets}

    def moved(visit: StageVisit) -> StageVisit:
        by = ahead.get(stage_label(visit.stage, nodes), 0.0)
        return StageVisit(
            stage=visit.stage,
            received_s=visit.received_s - by,
            started_s=visit.started_s - by,
            computed_s=visit.computed_s - by,
            sent_s=visit.sent_s - by,
            copy_s=visit.copy_s,
        )

    return tuple(
        TokenTrace(number=t.number, visits=tuple(moved(v) for v in t.visits), arrived_s=t.arrived_s, user=t.user) for t in traces
    )


def refine_offsets(traces: Sequence[TokenTrace], offsets: Sequence[ClockOffset], nodes: Sequence[str]) -> tuple[ClockOffset, ...]:
    """Narrow each offset by causality: nothing is received before it was sent (Cristian's bounds over all hops).

    Between neighbouring stages the smallest forward difference bounds the offset from one side, and the way back
    from the other; where the ping's estimate would make a transfer negative, it is moved to the nearest allowed value.
    """
    fixed = list(offsets)
    for _ in range(len(fixed)):
        moved = to_common_clock(traces, fixed, nodes)
        worst: dict[str, float] = {}
        for trace in moved:
            for before, after in itertools.pairwise(trace.visits):
                gap_s = after.received_s - before.sent_s
                label = stage_label(after.stage, nodes)
                worst[label] = min(worst.get(label, 0.0), gap_s)
        if all(value >= 0 for value in worst.values()):
            break
        fixed = [_shifted(offset, worst.get(offset.node, 0.0)) for offset in fixed]
    return tuple(fixed)


def _shifted(offset: ClockOffset, by_s: float) -> ClockOffset:
    return ClockOffset(node=offset.node, offset_s=offset.offset_s + by_s, error_s=offset.error_s + abs(by_s))


class Accounting(Record):
    """The sum of a token's parts beside its measured time."""

    parts_s: float
    measured_s: float

    @property
    def gap(self) -> float:
        """What the parts miss, as a share of the measured time."""
        return abs(self.parts_s - self.measured_s) / self.measured_s if self.measured_s else 0.0


def account(trial: TrialResult) -> Accounting:
    """Means on both sides, because only means add up."""
    summed = sum(statistics.fmean(part.seconds) for part in trial.parts if part.seconds)
    return Accounting(parts_s=summed, measured_s=trial.parts_measured_s)


class Culprit(Record):
    """A part that got slower. `extra_s` a token; `factor` is new over base with its interval."""

    kind: str
    where: str
    extra_s: float
    base_s: float
    new_s: float
    factor: Interval

    def sentence(self) -> str:
        """In plain words."""
        extra = f"{self.extra_s * 1e3:.2f} ms more a token"
        if self.kind == "compute":
            speed = self.base_s / self.new_s if self.new_s else 0.0
            return f"{self.where} computes at {speed:.0%} of the speed it had ({extra})"
        if self.kind == "transfer":
            source, target = self.where.split(">")
            return f"the link from {source} to {target} takes {extra}"
        if self.kind == "copy":
            return f"copying activations out of {self.where} takes {extra}"
        return f"tokens wait before {self.where} ({extra})"


def culprits(base: Sequence[TrialResult], new: Sequence[TrialResult], *, share: float = 0.1) -> list[Culprit]:
    """Parts that are slower beyond the noise and make up at least `share` of the extra time, the largest first.

    A part counts when it is slower in every repetition than in every one of the base: a burst of load on the machine hits
    some repetitions, a fault hits all. Its size is the difference of the medians over all tokens where the base's own
    repetitions agree, and of the quiet moments (the tenth percentile of the quietest repetition) where they do not.
    """
    before, after = _by_part(base), _by_part(new)
    found = [
        culprit
        for key, seconds in after.items()
        if key in before and (culprit := _culprit(key, before[key], seconds)) is not None
    ]
    total_s = sum(culprit.extra_s for culprit in found)
    return sorted((c for c in found if c.extra_s >= share * total_s), key=lambda c: -c.extra_s)


def _culprit(key: tuple[str, str], old: list[tuple[float, ...]], new: list[tuple[float, ...]]) -> Culprit | None:
    old_middles, new_middles = ([quantile(seconds, 0.5) for seconds in side] for side in (old, new))
    old_all, new_all = list(itertools.chain(*old)), list(itertools.chain(*new))
    base_s, new_s = quantile(old_all, 0.5), quantile(new_all, 0.5)
    factor = bootstrap_ratio(old_all, new_all, num_draws=400)
    steady = max(old_middles) - min(old_middles) <= _STEADY * abs(new_s - base_s)
    if not (steady and min(new_middles) > max(old_middles) and factor.low > 1.0):
        old_quiet, new_quiet = ([quantile(seconds, 0.1) for seconds in side] for side in (old, new))
        base_s, new_s = min(old_quiet), min(new_quiet)
        if new_s <= max(old_quiet) or base_s <= 0:
            return None
        factor = Interval(value=new_s / base_s, low=new_s / max(old_quiet), high=max(new_quiet) / base_s)
    if new_s - base_s <= _NOISE_S:
        return None
    return Culprit(kind=key[0], where=key[1], extra_s=new_s - base_s, base_s=base_s, new_s=new_s, factor=factor)


def _by_part(trials: Sequence[TrialResult]) -> dict[tuple[str, str], list[tuple[float, ...]]]:
    """Each part's seconds, one entry a repetition."""
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for trial in trials:
        for part in trial.parts:
            if part.seconds:
                found.setdefault((part.kind, part.where), []).append(part.seconds)
    return found
