"""`shardwise bench SCENARIO`, and what belongs to it: report, compare, gate, list, lab. No logic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shardwise.cli.common import output


class _ScenarioFirst(TyperGroup):
    """`bench home` means `bench run home`: whatever is no sub-command is a scenario."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_ScenarioFirst, no_args_is_help=True, help="Measure: run scenarios, compare, report.")
lab_app = typer.Typer(no_args_is_help=True, help="The virtual home network.")
app.add_typer(lab_app, name="lab")

Result = Annotated[Path, typer.Argument(help="A result file or a run's folder.", metavar="RESULT")]


@app.command("run", help="Run a scenario (a name from 'bench list', or a .toml file); resumes what was interrupted.")
def run(
    scenario: Annotated[str, typer.Argument(metavar="SCENARIO")],
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder; default runs/SCENARIO.")] = None,
    repetitions: Annotated[int, typer.Option("--repetitions", help="Instead of the scenario's; 0 = the scenario's.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of the order and the links; 0 = the scenario's.")] = 0,
    model: Annotated[str, typer.Option("--model", help="Instead of the scenario's.")] = "",
    threads: Annotated[int, typer.Option("--threads", "-t", help="Threads of a stage; 0 = the scenario's.")] = 0,
    peers: Annotated[Path | None, typer.Option("--peers", help="Folder of the peers' scripts.")] = None,
) -> None:
    from shardwise.bench.run_command import run_and_report

    done = run_and_report(
        scenario,
        out=out,
        repetitions=repetitions,
        seed=seed,
        model=model,
        threads=threads,
        peer_scripts=peers,
        quiet=output().quiet,
    )
    output().document(done.summary) if output().json else output().plain(done.text)


@app.command("report", help="Write report.html, report.md and trace.json from a result.")
def report(
    result: Result, out: Annotated[Path | None, typer.Option("--out", help="Folder; default beside the result.")] = None
) -> None:
    from shardwise.bench.run_command import write_reports
    from shardwise.bench.store import load_result

    paths = write_reports(load_result(result), out or (result if result.is_dir() else result.parent))
    _show({"files": [str(path) for path in paths]}, "\n".join(str(path) for path in paths))


@app.command("compare", help="Which figures of two results differ, and whether that is more than noise.")
def compare(base: Result, new: Result) -> None:
    from shardwise.bench.compare import compare as compare_results
    from shardwise.bench.store import load_result
    from shardwise.records import plain

    found = compare_results(load_result(base), load_result(new))
    lines = [f"warning: {warning}" for warning in found.warnings]
    lines += [difference.sentence() for difference in found.differences]
    lines += [f"culprit in {case}: {culprit.sentence()}" for case, culprit in found.culprits]
    lines += [f"only in {base}: {key}" for key in found.only_base] + [f"only in {new}: {key}" for key in found.only_new]
    lines.append(f"{len(found.regressions)} regressions in {len(found.differences)} figures")
    _show(plain(found) | {"regressions": len(found.regressions)}, "\n".join(lines))


@app.command("gate", help="Check ratios of a result against a gate file; exit 1 when one is outside its limits.")
def gate(result: Result, rules: Annotated[Path, typer.Argument(help="TOML with [[rule]] tables.", metavar="GATE")]) -> None:
    from shardwise.bench.run_command import check_gate_file
    from shardwise.records import plain

    findings = check_gate_file(result, rules)
    lines = [f"{'ok  ' if finding.ok else 'FAIL'} {finding.rule}: {finding.message}" for finding in findings]
    _show({"findings": [plain(finding) for finding in findings]}, "\n".join(lines))
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


@app.command("list", help="The scenarios that come with the program.")
def list_scenarios() -> None:
    from shardwise.bench.scenario import load_scenario, scenario_names

    found = [load_scenario(name) for name in scenario_names()]
    rows = [{"name": s.name, "title": s.title, "trials": len(s.cases()) * s.repetitions} for s in found]
    _show({"scenarios": rows}, "\n".join(f"{row['name']:<16}{row['title']} ({row['trials']} trials)" for row in rows))


@app.command("truth", help="Inject faults of known size into a virtual home and see whether they are found (root, minutes).")
def truth(
    out: Annotated[Path, typer.Option("--out", help="The run's folder.")] = Path("runs") / "truth",
    repetitions: Annotated[int, typer.Option("--repetitions")] = 3,
) -> None:
    from shardwise.bench.run_command import run_truth
    from shardwise.records import plain

    found = run_truth(out, repetitions=repetitions, quiet=output().quiet)
    lines = [f"{'ok  ' if t.ok else 'FAIL'} {t.injected}: {t.sentence} ({t.error:+.0%})" for t in found]
    _show({"truths": [plain(t) | {"error": t.error, "ok": t.ok} for t in found]}, "\n".join(lines))
    if not all(t.ok for t in found):
        raise typer.Exit(1)


@app.command("published", help="Predict published measurements: devices from single-device rows, then all rows.")
def published(
    file: Annotated[Path, typer.Argument(help="A JSON list of rows.", metavar="FILE")],
    rows: Annotated[bool, typer.Option("--rows", help="Also list every row.")] = False,
) -> None:
    from shardwise.bench.published import predict_file, report_lines
    from shardwise.records import plain

    found = predict_file(file)
    _show(plain(found), "\n".join(report_lines(found, with_rows=rows)))


@lab_app.command("clean", help="Take down virtual homes whose owner is gone.")
def lab_clean(everything: Annotated[bool, typer.Option("--all", help="Also those in use.")] = False) -> None:
    from shardwise.bench.lab import clean

    numbers = clean(everything=everything)
    _show({"cleaned": numbers}, f"{len(numbers)} virtual homes taken down")


@lab_app.command("check", help="Measure whether the shapes of the virtual home are true (about a minute).")
def lab_check() -> None:
    from shardwise.bench.lab.measure import check_all
    from shardwise.records import plain

    checks = check_all()
    lines = [
        f"{'ok  ' if c.ok else 'FAIL'} {c.what}: asked {c.asked:g} {c.unit}, measured {c.measured:.6g} ({c.tolerance})"
        for c in checks
    ]
    _show({"checks": [plain(check) for check in checks], "ok": all(check.ok for check in checks)}, "\n".join(lines))
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


@lab_app.command("profiles", help="The named links and where their figures come from.")
def lab_profiles() -> None:
    from shardwise.bench.lab import link_presets
    from shardwise.records import plain

    presets = link_presets()
    lines = [f"{name:<16}{preset.title}. Source: {preset.source}" for name, preset in presets.items()]
    _show({name: plain(preset) for name, preset in presets.items()}, "\n".join(lines))


def _show(document: Any, text: str) -> None:
    if output().json:
        output().document(document)
    else:
        output().plain(text)
