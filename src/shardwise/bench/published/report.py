"""`bench published FILE`: calibrate on the single-device rows, predict every row, sum up.

Promises: one entry a row in the file's order, with a prediction or a reason, never neither. A single-device row is predicted
without itself. Fails with `UsageError` when the file cannot be read.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from shardwise.bench.published.calibration import Calibration, Sample, invert
from shardwise.bench.published.case import Case, Skip, prepare
from shardwise.bench.published.predictors import predict_case
from shardwise.bench.published.rows import Row, load_rows
from shardwise.bench.published.steps import spills
from shardwise.records import Record

_PHASE = {"decode": "decode", "layer_decode": "decode", "prefill": "prefill", "layer_prefill": "prefill"}


class PublishedRow(Record):
    """One row's verdict. `error` = (predicted - measured) / measured."""

    id: int | str | float | None
    predicted: float | None
    measured: float | None
    error: float | None
    skipped: str | None
    kind: str = ""  # single | multi
    group: str = ""  # program


class GroupSummary(Record):
    """Errors of some rows."""

    rows: int
    predicted: int
    median_absolute_error: float | None
    p90_absolute_error: float | None


class PublishedSummary(Record):
    """Over the whole file. `multi` is what counts: no such row was used for calibration."""

    rows: int
    predicted: int
    skipped: int
    skipped_share: float
    median_absolute_error: float | None  # rows with several machines
    multi: GroupSummary
    single: GroupSummary  # each without itself
    leave_one_source_out: GroupSummary  # several machines, nothing of the row's own source used
    by_program: dict[str, GroupSummary]
    skip_reasons: dict[str, int]


class PublishedReport(Record):
    """The JSON document."""

    rows: tuple[PublishedRow, ...]
    summary: PublishedSummary


def predict_file(path: Path) -> PublishedReport:
    """Everything about one file."""
    return predict_rows(load_rows(path))


def predict_rows(rows: Sequence[Row]) -> PublishedReport:
    """The same for rows that are there."""
    cases = [_prepare(row) for row in rows]
    calibration = calibrate([c for c in cases if isinstance(c, Case)])
    out, strangers = [], []
    for row, case in zip(rows, cases):
        used = calibration.without(row_id=row.id) if row.is_single else calibration
        out.append(_judge(row, case, used))
        if not row.is_single:
            strangers.append(_judge(row, case, calibration.without(source=row.source)))
    return PublishedReport(rows=tuple(out), summary=_summary(out, strangers))


def calibrate(cases: Sequence[Case]) -> Calibration:
    """Efficiencies of every device with a row of its own."""
    samples, empty = [], Calibration()
    for case in cases:
        phase = _PHASE.get(case.ask.quantity)
        if not case.row.is_single or phase is None or not case.row.measured or not case.row.value or spills(case):
            continue

        def seconds(efficiency: float, case: Case = case, phase: str = phase) -> float:
            value = _predicted(case, empty, {phase: efficiency})
            if isinstance(value, Skip) or value <= 0:
                return math.inf
            return 1.0 / value if case.ask.inverse else value

        measured = 1.0 / case.row.value if case.ask.inverse else case.row.value
        found = invert(seconds, measured)
        if found is not None and found < 1.5:  # more than half above the vendor's figure is a mistake in the row
            samples.append(Sample(case.key(case.devices[0].spec, phase), found, case.row.id, case.row.source))
    return Calibration(samples)


def _prepare(row: Row) -> Case | Skip:
    if not row.measured:
        return Skip("a simulator's or an upper-bound figure, not a measurement")
    if row.value is None or row.value == 0:
        return Skip("no measured value")
    return prepare(row)


def _predicted(case: Case, calibration: Calibration, override: dict[str, float] | None = None) -> float | Skip:
    """A row whose figures are each possible but not together ends in a division by nothing: that is its reason."""
    try:
        return predict_case(case, calibration, override)
    except ArithmeticError:
        return Skip("the row contradicts itself")


def _judge(row: Row, case: Case | Skip, calibration: Calibration) -> PublishedRow:
    kind = "single" if row.is_single else "multi"
    found = case if isinstance(case, Skip) else _predicted(case, calibration)
    group = "" if isinstance(case, Skip) else case.framework.name
    row_id = row.id if isinstance(row.id, int | str | float) else str(row.id)
    if isinstance(found, Skip) or not math.isfinite(found) or not row.value:
        reason = found.reason if isinstance(found, Skip) else "the row contradicts itself"
        return PublishedRow(id=row_id, predicted=None, measured=row.value, error=None, skipped=reason, kind=kind, group=group)
    error = (found - row.value) / row.value
    return PublishedRow(
        id=row_id,
        predicted=float(f"{found:.6g}"),
        measured=row.value,
        error=round(error, 4),
        skipped=None,
        kind=kind,
        group=group,
    )


def _group(rows: Sequence[PublishedRow]) -> GroupSummary:
    errors = sorted(abs(r.error) for r in rows if r.error is not None)
    return GroupSummary(
        rows=len(rows),
        predicted=len(errors),
        median_absolute_error=round(statistics.median(errors), 4) if errors else None,
        p90_absolute_error=round(errors[min(len(errors) - 1, int(0.9 * len(errors)))], 4) if errors else None,
    )


def _summary(rows: Sequence[PublishedRow], strangers: Sequence[PublishedRow]) -> PublishedSummary:
    multi = [r for r in rows if r.kind == "multi"]
    programs: dict[str, list[PublishedRow]] = defaultdict(list)
    for row in rows:
        programs[row.group or "not read"].append(row)
    reasons: dict[str, int] = defaultdict(int)
    for row in rows:
        if row.skipped:
            reasons[row.skipped] += 1
    skipped = sum(1 for r in rows if r.skipped)
    return PublishedSummary(
        rows=len(rows),
        predicted=len(rows) - skipped,
        skipped=skipped,
        skipped_share=round(skipped / len(rows), 4) if rows else 0.0,
        median_absolute_error=_group(multi).median_absolute_error,
        multi=_group(multi),
        single=_group([r for r in rows if r.kind == "single"]),
        leave_one_source_out=_group(strangers),
        by_program={name: _group(found) for name, found in sorted(programs.items())},
        skip_reasons=dict(reasons),
    )
