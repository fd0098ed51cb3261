"""The HTML report: one file, no script from anywhere, works offline, light and dark, on a phone and on paper."""

from __future__ import annotations

from importlib import resources

import jinja2
from markupsafe import Markup

from shardwise.bench.report.charts import fault_timeline, latency_curves, memory_bars, short_name, stacked_bars, timeline
from shardwise.bench.report.summary import gather_findings
from shardwise.bench.report.svg import milliseconds
from shardwise.bench.result import METRICS, Case, ResultFile
from shardwise.units import format_bytes


def _decode_keys(result: ResultFile) -> list[str]:
    """Cases that say something about the time between tokens, longest answers first, at most twelve."""
    cases = {key: trials[0].case for key, trials in result.cases().items() if any(trial.gaps_s for trial in trials)}
    own = [key for key, case in cases.items() if case.engine == "shardwise" and case.num_users == 1 and not case.faults]
    longest: dict[tuple[str, str], str] = {}
    for key in sorted(own, key=lambda key: cases[key].output_tokens):
        longest[cases[key].split, cases[key].network] = key
    return sorted(longest.values(), key=lambda key: (cases[key].network, len(cases[key].hosts), cases[key].split))[:12]


def render_html(result: ResultFile) -> str:
    """The page."""
    folder = resources.files("shardwise.bench.report")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["ms"] = milliseconds
    environment.filters["bytes"] = format_bytes
    template = environment.from_string(folder.joinpath("page.html.jinja").read_text(encoding="utf-8"))
    keys = _decode_keys(result)
    traced = [(key, trial) for key in keys for trial in result.cases()[key][:1] if trial.tokens and len(trial.case.hosts) > 1]
    faulty = [(key, trial) for key, trials in result.cases().items() for trial in trials[:1] if trial.events]
    return template.render(
        result=result,
        findings=gather_findings(result),
        metrics=METRICS,
        style=Markup(folder.joinpath("page.css").read_text(encoding="utf-8")),
        stacked=Markup(stacked_bars(result, keys)),
        curves=Markup(latency_curves(result, keys)),
        timelines=[(_title(trial.case), Markup(timeline(trial))) for key, trial in traced[:3]],
        faults=[(_title(trial.case), Markup(fault_timeline(trial))) for key, trial in faulty],
        memory=Markup(memory_bars(result)),
        title_of=_title,
    )


def _title(case: Case) -> str:
    return ", ".join([short_name(case), *case.faults, f"on {case.network}"])
