"""The report in Markdown: verdict first, then the same tables as the page, for a README or an issue."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.bench.compare import pooled_parts
from shardwise.bench.report.charts import short_name
from shardwise.bench.report.summary import CaseRow, Findings, gather_findings
from shardwise.bench.report.svg import milliseconds
from shardwise.bench.result import METRICS, ResultFile


def render_markdown(result: ResultFile) -> str:
    """The text."""
    findings = gather_findings(result)
    lines = [f"# {result.title or result.name}", "", f"**{findings.verdict.headline}**", ""]
    lines += [f"- {reason}" for reason in findings.verdict.reasons]
    lines += [f"- Note: {warning}" for warning in findings.warnings]
    lines += ["", "## Measured", "", *_case_table(findings.rows)]
    lines += _parts_section(result, findings)
    lines += _prediction_section(findings)
    if findings.recoveries:
        lines += ["", "## When something breaks", "", *_table(["case", "what happened", "outcome"], findings.recoveries)]
    if findings.peers:
        lines += ["", "## Other programs, same weights, prompts and network", "", *_case_table(findings.peers)]
    env = result.environment
    lines += ["", "## How", ""]
    lines += [f"{env.cpu}, {env.num_cores} cores, {env.system} {env.kernel}, load {env.load_1min:.1f}, {env.started}."]
    lines += [", ".join(f"{name} {version}" for name, version in env.versions.items()) + "."]
    lines += [f"{len(result.trials)} trials in random order (seed {result.seed}), scenario `{result.name}`."]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *body]


def _case_table(rows: Sequence[CaseRow]) -> list[str]:
    head = ["split, load", "network", *(metric.title for metric in METRICS), "repeats differ by"]
    body = []
    for row in rows:
        name = ", ".join([short_name(row.case), *row.case.faults])
        cells = row.cells() if row.figures else [row.error, *[""] * (len(METRICS) - 1)]
        body.append([name, row.case.network, *cells, "–" if row.noise is None else f"{row.noise:.0%}"])
    return _table(head, body)


def _parts_section(result: ResultFile, findings: Findings) -> list[str]:
    body = []
    for key, trials in result.cases().items():
        case = trials[0].case
        if case.engine == "shardwise" and case.num_users == 1 and not case.faults:
            for part in pooled_parts(result, key):
                body.append([f"{short_name(case)}, {case.network}", part.kind, part.where, milliseconds(part.p50_s)])
    if not body:
        return []
    words = f"The parts add up to the measured time within {findings.accounting:.1%}."
    lines = ["", "## Where the time of one token goes", "", words, "", *_table(["case", "part", "where", "median"], body)]
    return [*lines, "", *(f"- {name}: {culprit.sentence()}." for name, culprit in findings.slow_parts)]


def _prediction_section(findings: Findings) -> list[str]:
    if not findings.predictions:
        return []
    body = [
        [f"{short_name(row.case)}, {row.case.network}", row.what, row.predicted, row.measured, f"{row.error:+.0%}"]
        for row in findings.predictions
    ]
    return ["", "## Predicted and measured", "", *_table(["case", "figure", "predicted", "measured", "error"], body)]
