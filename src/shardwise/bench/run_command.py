"""What `shardwise bench` does, in one call each: run a scenario and report it, write reports, check a gate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.bench.deployment_runner import DeploymentRunner
from shardwise.bench.gate import GateFinding, check_gate, read_gate
from shardwise.bench.peer_runner import PEERS, PeerRunner
from shardwise.bench.prediction import with_predictions
from shardwise.bench.progress import ConsoleProgress
from shardwise.bench.report import chrome_trace, render_html, render_markdown
from shardwise.bench.report.summary import Findings, gather_findings
from shardwise.bench.report.svg import milliseconds
from shardwise.bench.result import ResultFile
from shardwise.bench.runner import GroupRunner, run_scenario
from shardwise.bench.scenario import Scenario, load_scenario
from shardwise.bench.store import TrialStore, load_result
from shardwise.bench.truth import Truth, measure_truth
from shardwise.errors import UsageError
from shardwise.records import Record, plain, replace, to_json

DEFAULT_SCRIPTS = Path("benchmarks") / "peers"  # in a checkout


class RunDone(Record):
    """What a finished run says: one JSON document, or text."""

    summary: dict[str, Any]
    text: str


def run_and_report(
    name: str,
    *,
    out: Path | None = None,
    repetitions: int = 0,
    seed: int = 0,
    model: str = "",
    threads: int = 0,
    peer_scripts: Path | None = None,
    quiet: bool = False,
) -> RunDone:
    """Run (or go on with) a scenario, then write its reports. Overrides of 0 or "" mean the scenario's own values."""
    scenario = overridden(load_scenario(name), repetitions=repetitions, seed=seed, model=model, threads=threads)
    store = TrialStore(out or Path("runs") / scenario.name, scenario)
    with ConsoleProgress(quiet=quiet) as progress:
        result = run_scenario(scenario, store, engine_runners(peer_scripts or DEFAULT_SCRIPTS), progress)
    result = with_predictions(result, scenario)
    store.write(result)
    paths = write_reports(result, store.folder)
    findings = gather_findings(result)
    return RunDone(summary=_summary(result, findings, paths), text=_text(findings, paths))


def engine_runners(scripts: Path) -> dict[str, GroupRunner]:
    """Who measures which engine; `scripts` is the folder of the peers' scripts."""
    peers = {name: PeerRunner(peer, scripts) for name, peer in PEERS.items()}
    return {"shardwise": DeploymentRunner(), **peers}


def run_truth(folder: Path, *, repetitions: int, quiet: bool) -> list[Truth]:
    """Run the scenario `truth`, report it, and say what was found."""
    with ConsoleProgress(quiet=quiet) as progress:
        result, found = measure_truth(folder, progress, repetitions=repetitions)
    write_reports(result, folder)
    return found


def overridden(scenario: Scenario, *, repetitions: int, seed: int, model: str, threads: int) -> Scenario:
    """The scenario with what the command line says instead."""
    for field, value in (("repetitions", repetitions), ("seed", seed), ("threads", threads)):
        if value < 0:
            raise UsageError(f"--{field} {value}", where=field, hint="0 or more")
    given: dict[str, Any] = {"repetitions": repetitions, "seed": seed, "model": model, "num_threads": threads}
    return replace(scenario, **{key: value for key, value in given.items() if value})


def write_reports(result: ResultFile, folder: Path) -> list[Path]:
    """`report.html`, `report.md`, `trace.json`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "report.html": render_html(result).encode(),
        "report.md": render_markdown(result).encode(),
        "trace.json": to_json(chrome_trace(result)),
    }
    for file, data in texts.items():
        (folder / file).write_bytes(data)
    return [folder / file for file in texts]


def check_gate_file(result: Path, rules: Path) -> list[GateFinding]:
    """A result against a gate file."""
    try:
        text = rules.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the gate file: {error}", where=str(rules)) from error
    return check_gate(load_result(result), read_gate(text, where=str(rules)))


def _summary(result: ResultFile, findings: Findings, paths: list[Path]) -> dict[str, Any]:
    return {
        "verdict": plain(findings.verdict),
        "complete": result.complete,
        "trials": len(result.trials),
        "failed": sum(trial.error is not None for trial in result.trials),
        "parts_gap": findings.accounting,
        "cases": [
            {"case": row.case.key, "metrics": row.figures, "noise": row.noise, "error": row.error} for row in findings.rows
        ],
        "files": [str(path) for path in paths],
    }


def _text(findings: Findings, paths: list[Path]) -> str:
    lines = [findings.verdict.headline, *(f"  {reason}" for reason in findings.verdict.reasons), ""]
    for row in findings.rows:
        middle = row.figures.get("inter_token_p50_s")
        tail = row.figures.get("inter_token_p95_s")
        figures = f"{milliseconds(middle)} a token, p95 {milliseconds(tail)}" if middle and tail else row.error or "no figures"
        names = [row.case.split, row.case.workload, *row.case.faults]
        lines.append(f"{row.case.network:<10}{', '.join(names):<44}{figures}")
    return "\n".join([*lines, "", *(f"note: {warning}" for warning in findings.warnings), *(str(path) for path in paths)])
