"""The report's pictures, each from a result file. An empty string where there is nothing to draw."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwise.bench.compare import pooled_parts
from shardwise.bench.report.svg import WIDTH, drawing, line, milliseconds, polyline, rect, text, ticks
from shardwise.bench.result import Case, ResultFile, TrialResult
from shardwise.bench.stats import quantile
from shardwise.units import format_bytes

_LEFT, _RIGHT, _ROW = 250, 96, 34
_KINDS = ("compute", "copy", "queue", "transfer")


def short_name(case: Case) -> str:
    """Split, load and network in one line."""
    engine = "" if case.engine == "shardwise" else f"{case.engine}, "
    return f"{engine}{case.split}, {case.workload}"


def stacked_bars(result: ResultFile, keys: Sequence[str]) -> str:
    """Median time of each part of a token, one bar a case; the tick is what was predicted."""
    rows = []
    for key in keys:
        medians = [(part.kind, part.where, part.p50_s) for part in pooled_parts(result, key)]
        if medians:
            order = {kind: index for index, kind in enumerate(_KINDS)}
            rows.append((result.cases()[key][0], sorted(medians, key=lambda row: order[row[0]])))
    if not rows:
        return ""
    top = max(max(sum(value for _, _, value in medians), predicted_token_s(trial) or 0.0) for trial, medians in rows)
    scale = (WIDTH - _LEFT - _RIGHT) / top
    height = _ROW * len(rows) + 34
    parts = [piece for tick in ticks(top) for piece in _axis(_LEFT + tick * scale, height - 22, milliseconds(tick))]
    for index, (trial, medians) in enumerate(rows):
        y, x = index * _ROW + 4.0, float(_LEFT)
        parts.append(text(_LEFT - 8, y + 10, short_name(trial.case), anchor="end"))
        parts.append(text(_LEFT - 8, y + 22, trial.case.network, css="faint", anchor="end"))
        for kind, where, value in medians:
            parts.append(rect(x, y, value * scale, 20, f"part-{kind}", f"{_part_words(kind, where)}: {milliseconds(value)}"))
            x += value * scale
        parts.append(text(x + 6, y + 14, milliseconds(sum(value for _, _, value in medians)), css="figure"))
        if predicted := predicted_token_s(trial):
            parts.append(
                rect(_LEFT + predicted * scale - 1, y - 2, 2.5, 24, "predicted", f"predicted: {milliseconds(predicted)}")
            )
    return drawing(height, parts, "Where the time of one token goes, case by case")


def _part_words(kind: str, where: str) -> str:
    if kind == "transfer":
        return "link " + where.replace(">", " to ")
    return {"compute": "compute on ", "copy": "copy out of ", "queue": "waiting before "}[kind] + where


def predicted_token_s(trial: TrialResult) -> float | None:
    """The predicted median time between tokens, if the trial has one."""
    found = trial.predicted.get("inter_token_s", {})
    value = found.get("p50") if isinstance(found, dict) else None
    return float(value) if value else None


def _axis(x: float, bottom: float, label: str) -> list[str]:
    return [line(x, 0, x, bottom, "grid"), text(x, bottom + 14, label, css="faint", anchor="middle")]


def latency_curves(result: ResultFile, keys: Sequence[str]) -> str:
    """Share of tokens that came within a time, one curve a case, logarithmic in time."""
    curves = []
    for key in keys:
        gaps = sorted(gap for trial in result.cases()[key] if trial.error is None for gap in trial.gaps_s)
        if len(gaps) >= 10:
            curves.append((result.cases()[key][0].case, gaps))
    if not curves:
        return ""
    low = max(1e-4, min(quantile(gaps, 0.01) for _, gaps in curves))
    high = max(result.target_inter_token_p95_s * 1.2, max(gaps[-1] for _, gaps in curves))
    left, top, bottom = 60.0, 10.0, 240.0
    width = WIDTH - left - 20

    def at_x(seconds: float) -> float:
        return left + width * (math.log(max(seconds, low)) - math.log(low)) / (math.log(high) - math.log(low))

    def at_y(share: float) -> float:
        return bottom - (bottom - top) * share

    parts = [line(left, at_y(share), WIDTH - 20, at_y(share), "grid") for share in (0.0, 0.5, 0.95, 1.0)]
    parts += [text(left - 6, at_y(share) + 4, f"{share:.0%}", css="faint", anchor="end") for share in (0.0, 0.5, 0.95)]
    decades = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    parts += [piece for power in decades for piece in _axis(at_x(10.0**power), bottom, milliseconds(10.0**power))]
    target = at_x(result.target_inter_token_p95_s)
    parts += [
        line(target, top, target, bottom, "target"),
        text(target - 4, top + 12, "target for p95", css="faint", anchor="end"),
    ]
    for number, (case, gaps) in enumerate(curves):
        points = [(at_x(gaps[min(len(gaps) - 1, int(step / 100 * len(gaps)))]), at_y(step / 100)) for step in range(101)]
        css = f"curve c{number % 6}" + (" dashed" if case.network_kind in ("wireless", "wan") else "")
        parts.append(polyline(points, css, f"{short_name(case)} on {case.network}"))
        y = bottom + 40 + 18 * number
        parts += [line(left, y - 4, left + 30, y - 4, css), text(left + 38, y, f"{short_name(case)} on {case.network}")]
    return drawing(bottom + 40 + 18 * len(curves), parts, "How many tokens came within which time")


def timeline(trial: TrialResult) -> str:
    """A few tokens on their way through the stages."""
    tokens = [token for token in trial.tokens if token.user == 0][:6]
    if not tokens:
        return ""
    start = min(visit.received_s for token in tokens for visit in token.visits)
    end = max(visit.sent_s for token in tokens for visit in token.visits)
    scale = (WIDTH - 150 - 20) / max(end - start, 1e-9)
    hosts = trial.case.hosts
    height = 40 * len(hosts) + 30
    parts = [piece for tick in ticks(end - start) for piece in _axis(150 + tick * scale, height - 22, milliseconds(tick))]
    parts += [text(142, 40 * stage + 22, host, anchor="end") for stage, host in enumerate(hosts)]
    for token in tokens:
        for visit in token.visits:
            y = 40 * visit.stage + 6.0
            for kind, begin, until in (
                ("queue", visit.received_s, visit.started_s),
                ("compute", visit.started_s, visit.computed_s),
                ("copy", visit.computed_s, visit.sent_s),
            ):
                x, width = 150 + (begin - start) * scale, (until - begin) * scale
                parts.append(rect(x, y, width, 24, f"part-{kind}", f"token {token.number}: {kind} {milliseconds(until - begin)}"))
            parts.append(text(150 + (visit.started_s - start) * scale + 3, y + 16, str(token.number), css="inside"))
    return drawing(height, parts, f"{len(tokens)} tokens on their way through {len(hosts)} stages")


def fault_timeline(trial: TrialResult) -> str:
    """Tokens over time, with the faults; a flat piece is a stall."""
    if not trial.requests or not trial.events:
        return ""
    arrivals: list[list[float]] = []
    for request in trial.requests:
        times, at = [request.time_to_first_token_s], request.time_to_first_token_s
        for gap in request.inter_token_s:
            at += gap
            times.append(at)
        arrivals.append(times)
    end = max([times[-1] for times in arrivals if times] + [event.at_s for event in trial.events] + [1e-3])
    most = max(len(times) for times in arrivals)
    left, bottom, top = 50.0, 150.0, 26.0
    scale_x, scale_y = (WIDTH - left - 20) / end, (bottom - top) / max(1, most)
    parts = [piece for tick in ticks(end) for piece in _axis(left + tick * scale_x, bottom, milliseconds(tick))]
    for number, times in enumerate(arrivals):
        points = [(left + at * scale_x, bottom - scale_y * (count + 1)) for count, at in enumerate(times)]
        parts.append(polyline(points, f"curve c{number % 6}", f"user {number + 1}"))
    for number, event in enumerate(trial.events):
        x = left + event.at_s * scale_x
        anchor = "end" if x > WIDTH * 0.7 else "start"
        parts += [
            line(x, top - 8, x, bottom, "target"),
            text(x + 4 * (1 if anchor == "start" else -1), 12 + 12 * (number % 2), event.what, css="faint", anchor=anchor),
        ]
    parts.append(text(left - 6, top + 6, str(most), css="faint", anchor="end"))
    return drawing(bottom + 26, parts, "Tokens over time, with the faults")


def memory_bars(result: ResultFile) -> str:
    """The most memory each host needed, against what it may use."""
    peaks: dict[tuple[str, str], tuple[int, int]] = {}
    for trial in result.trials:
        by_node: dict[str, int] = {}
        for stage in trial.stages:
            by_node[stage.node] = by_node.get(stage.node, 0) + stage.peak_memory_bytes
        for stage in trial.stages:
            key = (trial.case.split, stage.node)
            old = peaks.get(key, (0, 0))[0]
            peaks[key] = (max(old, by_node[stage.node]), stage.memory_limit_bytes)
    if not peaks:
        return ""
    parts = []
    for index, ((split, node), (peak, limit)) in enumerate(sorted(peaks.items())):
        y = index * 26.0 + 4
        top = limit or max(value for value, _ in peaks.values())
        share = peak / top if top else 0.0
        parts.append(text(_LEFT - 8, y + 13, f"{node} ({split})", anchor="end"))
        parts.append(rect(_LEFT, y, WIDTH - _LEFT - 220, 18, "room"))
        css = "over" if share > 0.9 else "part-compute"
        parts.append(rect(_LEFT, y, (WIDTH - _LEFT - 220) * min(1.0, share), 18, css, f"{share:.0%} of the limit"))
        words = format_bytes(peak) + (f" of {format_bytes(limit)}" if limit else "")
        parts.append(text(WIDTH - 212, y + 13, words, css="figure"))
    return drawing(26.0 * len(peaks) + 8, parts, "Memory of each host against its limit")
