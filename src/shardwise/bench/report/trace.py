"""Chrome trace export: open the file in chrome://tracing or ui.perfetto.dev. One process a host, one row a stage."""

from __future__ import annotations

from typing import Any

from shardwise.bench.parts import stage_label
from shardwise.bench.result import ResultFile, TrialResult


def chrome_trace(result: ResultFile) -> dict[str, Any]:
    """The first good repetition of each case with traced tokens; microseconds."""
    events: list[dict[str, Any]] = []
    pid = 0
    for key, trials in result.cases().items():
        trial = next((trial for trial in trials if trial.tokens), None)
        if trial is None:
            continue
        for stage in range(len(trial.case.hosts)):
            pid += 1
            name = f"{key}: {stage_label(stage, trial.case.hosts)}"
            events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}})
            events += _stage_events(trial, stage, pid)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"scenario": result.name}}


def _stage_events(trial: TrialResult, stage: int, pid: int) -> list[dict[str, Any]]:
    events = []
    for token in trial.tokens:
        for visit in token.visits:
            if visit.stage != stage:
                continue
            spans = (
                ("queue", visit.received_s, visit.started_s),
                ("compute", visit.started_s, visit.computed_s),
                ("copy and send", visit.computed_s, visit.sent_s),
            )
            for name, start_s, end_s in spans:
                events.append(
                    {
                        "ph": "X",
                        "name": f"{name} (token {token.number})",
                        "cat": name,
                        "pid": pid,
                        "tid": token.user,
                        "ts": round(start_s * 1e6, 1),
                        "dur": round(max(0.0, end_s - start_s) * 1e6, 1),
                        "args": {"token": token.number, "user": token.user},
                    }
                )
    return events
