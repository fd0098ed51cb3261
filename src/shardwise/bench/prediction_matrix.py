"""Predictions against our own runs: `python -m shardwise.bench.prediction_matrix [--out DIR] [--networks a,b] [--evidence FILE]`.

    for each repetition: calibrate (a minute) -> write down every prediction -> run the scenario `predictions`
    medians of each cell's repetitions, predicted and measured -> a table

`--again` measures nothing: it predicts the cells of DIR anew from its calibrations, after the cost model has changed.

**Promises** predictions of a repetition are on disk before its first cell runs; an interrupted run goes on where it stopped, with
the same calibrations; it tells how busy the machine was. **Fails with** `UsageError` where there are no network namespaces.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardwise.bench.deployment_runner import DeploymentRunner
from shardwise.bench.environment import load_1min
from shardwise.bench.prediction_calibration import Calibration, calibrate, plan_for
from shardwise.bench.progress import ConsoleProgress
from shardwise.bench.result import Case, TrialResult
from shardwise.bench.runner import run_scenario
from shardwise.bench.scenario import Scenario, load_scenario
from shardwise.bench.stats import quantile
from shardwise.bench.store import TrialStore
from shardwise.deploy.options import RunOptions, main_quantization
from shardwise.errors import ShardwiseError, UsageError
from shardwise.model.description import ModelDescription
from shardwise.model.even_split import even_split
from shardwise.model.resolve import describe_model, resolve_model
from shardwise.planner.cost_model import CostModel
from shardwise.planner.predict import predict_with
from shardwise.planner.types import PlanRequest, Prediction, Workload
from shardwise.records import Record, from_json, replace, to_json

MAX_SESSIONS = 4
LIMITS = {  # metric -> (median, worst) absolute error that the issue allows; None = no limit
    "time_per_output_token_s": (0.10, 0.25),
    "time_to_first_token_s": (0.10, 0.25),
    "aggregate_tokens_per_s": (0.10, 0.25),
    "inter_token_p95_s": (0.25, None),
    "memory_bytes": (0.10, None),
}


class Cell(Record):
    """One figure of one case."""

    case: str
    metric: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return (self.predicted - self.measured) / self.measured if self.measured else 0.0


class Finding(Record):
    """One metric over the whole matrix."""

    metric: str
    cells: int
    median: float
    worst: float
    worst_case: str
    median_limit: float
    worst_limit: float | None
    ok: bool


def predict_cell(case: Case, scenario: Scenario, model: ModelDescription, known: Calibration) -> Prediction:
    """What a case will do."""
    workload = Workload(
        prompt_tokens=case.prompt_tokens,
        output_tokens=case.output_tokens,
        num_users=case.num_users,
        context_tokens=scenario.context_tokens,
        prefill_chunk_tokens=RunOptions().chunk(main_quantization(model)),
        warm=True,  # each case is warmed up right before it is measured
    )
    request = PlanRequest(model=model, cluster=known.cluster(case.hosts, case.network), workload=workload)
    cost = CostModel(request, known.costs)
    layers, start = [], 0
    for count in case.layers or even_split(model, len(case.hosts)):
        layers.append((start, start + count))
        start += count
    return predict_with(cost, plan_for(cost, case.hosts, tuple(layers), MAX_SESSIONS))


def measured_figures(trials: Sequence[TrialResult]) -> dict[str, float]:
    """The same figures as users saw them, over the repetitions of one case: medians; the tail of all gaps together."""
    return {
        "time_per_output_token_s": statistics.median(sum(t.gaps_s) / len(t.gaps_s) for t in trials),
        "time_to_first_token_s": statistics.median(t.metrics["time_to_first_token_s"] for t in trials),
        "aggregate_tokens_per_s": statistics.median(t.metrics["aggregate_tokens_per_s"] for t in trials),
        "inter_token_p95_s": quantile([gap for t in trials for gap in t.gaps_s], 0.95),
    }


def predicted_figures(found: Prediction) -> dict[str, float]:
    """By the same names."""
    return {
        "time_per_output_token_s": found.time_per_output_token_s,
        "time_to_first_token_s": found.time_to_first_token_s,
        "aggregate_tokens_per_s": found.aggregate_tokens_per_s,
        "inter_token_p95_s": found.inter_token_s.p95,
    }


def compare_case(trials: Sequence[TrialResult], ahead: Sequence[Prediction]) -> list[Cell]:
    """All figures of one case, medians over its repetitions and what was predicted for each; memory once a stage."""
    case = trials[0].case
    predictions = [predicted_figures(found) for found in ahead]
    cells = [
        Cell(case=case.key, metric=name, predicted=statistics.median(p[name] for p in predictions), measured=value)
        for name, value in measured_figures(trials).items()
    ]
    for index in range(len(ahead[0].stages)):
        cells.append(
            Cell(
                case=f"{case.key} / {trials[0].stages[index].node}",
                metric="memory_bytes",
                predicted=statistics.median(float(found.stages[index].peak_memory_bytes) for found in ahead),
                measured=statistics.median(float(t.stages[index].peak_memory_bytes) for t in trials),
            )
        )
    return cells


def judge(cells: list[Cell]) -> list[Finding]:
    """Each metric against its limits."""
    out = []
    for metric, (median_limit, worst_limit) in LIMITS.items():
        mine = [cell for cell in cells if cell.metric == metric]
        if not mine:
            continue
        worst = max(mine, key=lambda cell: abs(cell.error))
        median = quantile([abs(cell.error) for cell in mine], 0.5)
        ok = median <= median_limit and (worst_limit is None or abs(worst.error) <= worst_limit)
        out.append(
            Finding(
                metric=metric,
                cells=len(mine),
                median=median,
                worst=abs(worst.error),
                worst_case=worst.case,
                median_limit=median_limit,
                worst_limit=worst_limit,
                ok=ok,
            )
        )
    return out


def known_calibration(
    model: ModelDescription, scenario: Scenario, folder: Path, repetition: int, say: Callable[[str], None]
) -> Calibration:
    """The folder's calibration for a repetition, or a new one: a machine that others share is not the same an hour later."""
    path = folder / f"calibration-{repetition}.json"
    if path.exists():
        return from_json(path.read_bytes(), Calibration, where=str(path))
    found = calibrate(model, scenario, folder / "cache", say)
    path.write_bytes(to_json(found, indent=1))
    return found


def chosen(scenario: Scenario, networks: str, splits: str, loads: str) -> Scenario:
    """The scenario with some of its networks, splits and loads (comma-separated; empty = all)."""
    matrix = scenario.matrices[0]
    picked = {
        "networks": tuple(n for n in networks.split(",") if n) or matrix.networks,
        "splits": tuple(n for n in splits.split(",") if n) or matrix.splits,
        "loads": tuple(n for n in loads.split(",") if n) or matrix.loads,
    }
    return replace(scenario, matrices=(replace(matrix, **picked),))


def run_matrix(
    scenario: Scenario, folder: Path, *, part: Scenario | None = None, quiet: bool = False
) -> tuple[list[Cell], list[Finding], dict[str, float]]:
    """Calibrate, predict, run `part` of the scenario, compare all that was run. The last value: load before and after."""
    folder.mkdir(parents=True, exist_ok=True)
    say = (lambda text: None) if quiet else (lambda text: print(f"calibrating: {text}", file=sys.stderr, flush=True))
    busy = {"load_before": load_1min()}
    model = describe_model(resolve_model(scenario.model))
    store = TrialStore(folder / "trials", scenario)
    ahead: list[dict[str, Prediction]] = []
    for repetition in range(scenario.repetitions):
        known = known_calibration(model, scenario, folder, repetition, say)
        ahead.append({case.key: predict_cell(case, scenario, model, known) for case in scenario.cases()})
        (folder / f"predictions-{repetition}.json").write_bytes(to_json(ahead[-1], indent=1))
        with ConsoleProgress(quiet=quiet) as progress:
            so_far = replace(part or scenario, repetitions=repetition + 1)
            result = run_scenario(so_far, store, {"shardwise": DeploymentRunner()}, progress)
    busy["load_after"] = load_1min()
    cells = compare_all(result.trials, ahead)
    (folder / "cells.json").write_bytes(to_json(cells, indent=1))
    return cells, judge(cells), busy


def compare_all(trials: Sequence[TrialResult], ahead: Sequence[dict[str, Prediction]]) -> list[Cell]:
    """Every cell that was measured; `ahead`: the predictions for each repetition."""
    cases: dict[str, list[TrialResult]] = {}
    for trial in trials:
        if trial.error is None:
            cases.setdefault(trial.case.key, []).append(trial)
    return [
        cell for key, repeated in cases.items() for cell in compare_case(repeated, [ahead[t.repetition][key] for t in repeated])
    ]


def compare_again(scenario: Scenario, folder: Path) -> list[Finding]:
    """The cells of an earlier run against predictions of today's cost model, from that run's calibrations."""
    paths = sorted(folder.glob("calibration-*.json"))
    if not paths:
        raise UsageError("no calibration there", where=str(folder), hint="run without --again first")
    model = describe_model(resolve_model(scenario.model))
    ahead = []
    for path in paths:
        known = from_json(path.read_bytes(), Calibration, where=str(path))
        ahead.append({case.key: predict_cell(case, scenario, model, known) for case in scenario.cases()})
    lines = (folder / "trials" / "trials.jsonl").read_bytes().splitlines()
    return judge(compare_all([from_json(line, TrialResult, where=str(folder)) for line in lines], ahead))


def report_lines(findings: list[Finding], busy: dict[str, float] | None) -> list[str]:
    """A table for people, in Markdown."""
    lines = ["| figure | cells | median error | allowed | worst | allowed | worst cell | |", "|---|---|---|---|---|---|---|---|"]
    for f in findings:
        limit = f"{f.worst_limit:.0%}" if f.worst_limit is not None else "-"
        lines.append(
            f"| {f.metric} | {f.cells} | {f.median:.1%} | {f.median_limit:.0%} | {f.worst:.1%} | {limit} | {f.worst_case} "
            f"| {'met' if f.ok else 'missed'} |"
        )
    if busy is None:
        return lines
    return [*lines, "", f"Load of the machine: {busy['load_before']:.1f} before, {busy['load_after']:.1f} after."]


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Predictions against our own runs.")
    parser.add_argument("--out", type=Path, default=Path("runs") / "predictions")
    for name in ("networks", "splits", "loads"):
        parser.add_argument(f"--{name}", default="", help="some of the scenario's, comma-separated")
    parser.add_argument("--again", action="store_true", help="measure nothing: predict DIR's cells anew")
    parser.add_argument("--evidence", type=Path, help="append the table to this file")
    given: Any = parser.parse_args(arguments)
    try:
        scenario = load_scenario("predictions")
        busy = None
        if given.again:
            findings = compare_again(scenario, given.out)
        else:
            part = chosen(scenario, given.networks, given.splits, given.loads)
            _, findings, busy = run_matrix(scenario, given.out, part=part)
    except ShardwiseError as error:
        print(f"error: {error.one_line()}", file=sys.stderr)
        return error.exit_code
    text = "\n".join(report_lines(findings, busy))
    print(text)
    if given.evidence is not None:
        with given.evidence.open("a", encoding="utf-8") as file:
            file.write(f"\n{text}\n")
    return 0 if all(f.ok for f in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
