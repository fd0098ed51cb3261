"""The report: verdict first, complete, self-contained, escaped."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path

import pytest

from shardwise.bench.report import chrome_trace, render_html, render_markdown
from shardwise.bench.report.summary import gather_findings
from shardwise.bench.result import ResultFile, TrialError, TrialEvent, TrialResult
from shardwise.bench.run_command import write_reports
from shardwise.records import from_json, replace, to_json
from tests.bench.builders import make_case, make_result, make_trial

PREDICTED = {"inter_token_s": {"p50": 0.0081, "p95": 0.009}, "time_to_first_token_s": 0.012}


@pytest.fixture
def result() -> ResultFile:
    trials = []
    for repetition in range(3):
        trials.append(make_trial(make_case(hosts=("desktop",)), repetition, compute_s=(6e-3,)))
        trials.append(replace(make_trial(make_case(), repetition), predicted=PREDICTED))
        trials.append(make_trial(make_case(network="wifi"), repetition, link_s=9e-3))
        trials.append(make_trial(make_case(num_users=2, load="two users"), repetition))
    broken = replace(make_case(), faults=("kill <nas>",))
    events = (TrialEvent(at_s=0.1, what="kill nas at token 10"),)
    trials.append(replace(make_trial(broken), events=events))
    error = TrialError(type="StageOutOfMemory", message="needs 3 GiB & has <1 GiB>")
    trials.append(TrialResult(case=make_case(hosts=("nas",)), repetition=0, started="", duration_s=0.0, error=error))
    trials.append(make_trial(replace(make_case(), engine="llama.cpp RPC")))
    return make_result(trials)


class Checker(html.parser.HTMLParser):
    """Every element that is opened is closed; nothing is loaded from anywhere."""

    VOID = frozenset({"meta", "br", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(result: ResultFile) -> None:
    page = render_html(result)
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.loaded == []
    assert "<script" not in page
    assert "url(" not in page
    assert "prefers-color-scheme: dark" in page
    assert len(page) < 300_000


def test_the_verdict_comes_first_and_everything_is_there(result: ResultFile) -> None:
    page = render_html(result)
    body = page[page.index("<body>") :]
    headline = gather_findings(result).verdict.headline
    assert body.index(headline) < body.index("<h2>")
    headings = (
        "What was measured",
        "Where the time of one token goes",
        "How even the pace is",
        "Predicted and measured",
        "A few tokens on their way",
        "When something breaks",
        "Memory",
        "Other programs",
        "How it was measured",
    )
    for heading in headings:
        assert heading in body
    assert "kill &lt;nas&gt;" in body
    assert "needs 3 GiB &amp; has &lt;1 GiB&gt;" in body
    assert "<nas>" not in body


def test_markdown_says_the_same(result: ResultFile) -> None:
    text = render_markdown(result)
    findings = gather_findings(result)
    assert text.splitlines()[2] == f"**{findings.verdict.headline}**"
    assert "the link from desktop to nas takes" in text
    assert "llama.cpp RPC" in text
    tables = re.findall(r"(?:^\|.*\|\n)+", text, re.M)
    assert len(tables) >= 4
    for table in tables:
        assert len({row.count("|") - row.count("\\|") for row in table.strip().splitlines()}) == 1


def test_the_wireless_network_is_blamed_for_what_it_costs(result: ResultFile) -> None:
    blamed = gather_findings(result).slow_parts
    assert blamed[0][1].kind == "transfer"
    assert blamed[0][1].extra_s == pytest.approx(8.6e-3, rel=0.15)


def test_the_chrome_trace_has_a_process_a_stage(result: ResultFile) -> None:
    trace = chrome_trace(result)
    named = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert any(name.endswith(": nas") for name in named)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert spans
    assert all(span["dur"] >= 0 and span["ts"] >= 0 for span in spans)


def test_reports_are_written_and_the_result_reads_back(result: ResultFile, tmp_path: Path) -> None:
    paths = write_reports(result, tmp_path / "deep" / "folder")
    assert sorted(path.name for path in paths) == ["report.html", "report.md", "trace.json"]
    json.loads((tmp_path / "deep" / "folder" / "trace.json").read_text())
    assert from_json(to_json(result), ResultFile) == result


def test_an_empty_result_still_makes_a_report() -> None:
    empty = make_result([])
    assert "Nothing here can run this model" in render_html(empty)
    assert render_markdown(empty)
