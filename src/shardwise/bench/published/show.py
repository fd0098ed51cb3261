"""A `PublishedReport` as lines for people. Nothing fails."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.bench.published.report import GroupSummary, PublishedReport


def report_lines(report: PublishedReport, *, with_rows: bool = False) -> Iterator[str]:
    """The summary, the reasons, and on request every row."""
    summary = report.summary
    yield f"{summary.rows} rows: {summary.predicted} predicted, {summary.skipped} not ({summary.skipped_share:.0%})"
    yield _line("several machines", summary.multi)
    yield _line("one device, each row without itself", summary.single)
    yield _line("several machines, nothing of the row's own source", summary.leave_one_source_out)
    for name, group in summary.by_program.items():
        yield "  " + _line(name, group)
    for reason, count in sorted(summary.skip_reasons.items(), key=lambda item: -item[1]):
        yield f"{count} not predicted: {reason}"
    if with_rows:
        for row in report.rows:
            said = "-" if row.predicted is None else f"{row.predicted:g}"
            error = row.skipped or (f"{row.error:+.0%}" if row.error is not None else "")
            yield f"{row.id}\t{row.group or '-'}\t{row.measured}\t{said}\t{error}"


def _line(name: str, group: GroupSummary) -> str:
    if group.median_absolute_error is None:
        return f"{name}: {group.rows} rows, none predicted"
    return (
        f"{name}: median error {group.median_absolute_error:.1%}, 90 % under {group.p90_absolute_error:.1%} "
        f"({group.predicted} of {group.rows} rows)"
    )
