"""What both forms of the report say, gathered once from a result file: verdict, tables, findings. Pure."""

from __future__ import annotations

import statistics
from typing import Any

from shardwise.bench.compare import NOISE_FLOOR, repeat_noise
from shardwise.bench.evidence import gather_evidence
from shardwise.bench.parts import Culprit, account, culprits
from shardwise.bench.report.svg import milliseconds
from shardwise.bench.result import METRICS, Case, ResultFile, TrialResult
from shardwise.bench.stats import quantile
from shardwise.bench.verdict import Verdict, decide
from shardwise.records import Record

_PREDICTED = (
    ("time_to_first_token_s", ("time_to_first_token_s",), "Time to first token"),
    ("inter_token_p50_s", ("inter_token_s", "p50"), "Time between tokens, median"),
    ("inter_token_p95_s", ("inter_token_s", "p95"), "Time between tokens, p95"),
    ("decode_tokens_per_s", ("decode_tokens_per_s",), "Tokens per second, one user"),
    ("aggregate_tokens_per_s", ("aggregate_tokens_per_s",), "Tokens per second, all users"),
)


class CaseRow(Record):
    """One line of the table of results. `noise`: how much the repetitions differ (range over median)."""

    case: Case
    figures: dict[str, float]
    noise: float | None  # None of a single repetition
    failed: int
    error: str = ""

    def cells(self) -> list[str]:
        """The figures as text, in the order of `METRICS`."""
        return [_show(self.figures.get(metric.name), metric.unit) for metric in METRICS]


class PredictionRow(Record):
    """A figure that was predicted and measured."""

    case: Case
    what: str
    predicted: str
    measured: str
    error: float


class Findings(Record):
    """Everything the report says in words and tables."""

    verdict: Verdict
    rows: tuple[CaseRow, ...]
    predictions: tuple[PredictionRow, ...]
    accounting: float  # the largest gap between a token's parts and its measured time
    slow_parts: tuple[tuple[str, Culprit], ...]  # wireless against wired, same split and load
    peers: tuple[CaseRow, ...]
    offsets: tuple[tuple[str, float, float], ...]
    recoveries: tuple[tuple[str, str, str], ...]
    warnings: tuple[str, ...]


def gather_findings(result: ResultFile) -> Findings:
    """See `Findings`."""
    rows = sorted((_row(result, key, trials) for key, trials in result.cases().items()), key=_reading_order)
    plain = [trial for trial in result.trials if trial.parts and trial.case.num_users == 1 and not trial.case.faults]
    gaps = [account(trial).gap for trial in plain]
    return Findings(
        verdict=decide(gather_evidence(result)),
        rows=tuple(row for row in rows if row.case.engine == "shardwise"),
        predictions=tuple(row for trials in result.cases().values() for row in _predictions(result, trials[0])),
        accounting=max(gaps, default=0.0),
        slow_parts=tuple(_network_culprits(result)),
        peers=tuple(row for row in rows if row.case.engine != "shardwise"),
        offsets=tuple(_offsets(result)),
        recoveries=tuple(_recoveries(result)),
        warnings=tuple(_warnings(result, rows)),
    )


def _row(result: ResultFile, key: str, trials: list[TrialResult]) -> CaseRow:
    figures = {}
    for metric in METRICS:
        samples = result.samples(key, metric.name)
        if samples:
            figures[metric.name] = quantile(samples, 0.5)
    failed = [trial.error for trial in trials if trial.error is not None]
    return CaseRow(
        case=trials[0].case,
        figures=figures,
        noise=repeat_noise(samples) if len(samples := result.samples(key, "inter_token_p50_s")) > 1 else None,
        failed=len(failed),
        error=failed[0].message if failed else "",
    )


def _reading_order(row: CaseRow) -> tuple[str, int, str, int, int, str]:
    case = row.case
    return case.network, len(case.hosts), case.split, case.num_users, case.output_tokens, case.engine


def _show(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    return milliseconds(value) if unit == "s" else f"{value:.1f}"


def _predictions(result: ResultFile, trial: TrialResult) -> list[PredictionRow]:
    found = []
    for metric, path, title in _PREDICTED:
        value: Any = trial.predicted
        for step in path:
            value = value.get(step) if isinstance(value, dict) else None
        samples = result.samples(trial.case.key, metric)
        if not isinstance(value, int | float) or not value or not samples:
            continue
        measured = quantile(samples, 0.5)
        unit = "s" if metric.endswith("_s") and "per_s" not in metric else ""
        found.append(
            PredictionRow(
                case=trial.case,
                what=title,
                predicted=_show(float(value), unit),
                measured=_show(measured, unit),
                error=float(value) / measured - 1 if measured else 0.0,
            )
        )
    return found


def _network_culprits(result: ResultFile) -> list[tuple[str, Culprit]]:
    """For each split and load that was measured on two networks: what the rougher one costs, and where."""
    by_pair: dict[tuple[str, str], dict[str, str]] = {}
    for key, trials in result.cases().items():
        case = trials[0].case
        if case.engine == "shardwise" and case.num_users == 1 and not case.faults:
            by_pair.setdefault((case.split, case.workload), {})[case.network_kind] = key
    found = []
    for (split, load), kinds in by_pair.items():
        if "wired" in kinds and "wireless" in kinds:
            cases = result.cases()
            blamed = culprits(cases[kinds["wired"]], cases[kinds["wireless"]])
            found += [(f"{split}, {load}", culprit) for culprit in blamed[:2]]
    return found


def _offsets(result: ResultFile) -> list[tuple[str, float, float]]:
    by_node: dict[str, list[tuple[float, float]]] = {}
    for trial in result.trials:
        for offset in trial.clock_offsets:
            by_node.setdefault(offset.node, []).append((offset.offset_s, offset.error_s))
    return [
        (node, statistics.median(offset for offset, _ in pairs), statistics.median(error for _, error in pairs))
        for node, pairs in sorted(by_node.items())
    ]


def _recoveries(result: ResultFile) -> list[tuple[str, str, str]]:
    found = []
    for key, trials in result.cases().items():
        for trial in trials:
            if not trial.case.faults:
                continue
            longest = max(trial.gaps_s, default=0.0)
            actions = ", ".join(f"{r.action} ({r.grade or 'exact'}), stall {milliseconds(r.stall_s)}" for r in trial.recoveries)
            outcome = (
                trial.error.message if trial.error else actions or f"no recovery needed, longest gap {milliseconds(longest)}"
            )
            found.append((key, "; ".join(event.what for event in trial.events), outcome))
    return found


def _warnings(result: ResultFile, rows: list[CaseRow]) -> list[str]:
    found = []
    if not result.complete:
        found.append("The run is not complete; run the same command again to go on.")
    noisy = [row for row in rows if (row.noise or 0.0) > 3 * NOISE_FLOOR]
    if noisy:
        found.append(
            f"In {len(noisy)} of {len(rows)} cases the repetitions differ by more than {3 * NOISE_FLOOR:.0%}: a busy machine."
        )
    if result.environment.load_1min > result.environment.num_cores:
        found.append(f"The machine was busy when the run began (load {result.environment.load_1min:.1f}).")
    if result.environment.lab == "relays":
        found.append(
            "Made without root: hosts are this machine, links are relays on loopback; compare with runs of that kind only."
        )
    failed = sum(row.failed for row in rows if not row.case.faults)
    if failed:
        found.append(f"{failed} trials failed; their errors are in the table.")
    return found
