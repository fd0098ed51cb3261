"""The regression gate for CI: counts ratios, never seconds. Pure.

Seconds differ between CI machines; ratios inside one run do not: a split against the unsharded run beside it, the
relative cost of each boundary, bytes on the wire. A gate file names ratios with a limit; anything over it fails.
"""

from __future__ import annotations

import math

import msgspec

from shardwise.bench.result import METRICS, ResultFile
from shardwise.bench.stats import quantile
from shardwise.errors import UsageError
from shardwise.records import Record


class GateRule(Record):
    """`metric` of `case` divided by `metric` of `over` must be within [`at_least`, `at_most`]."""

    name: str
    metric: str
    case: str
    over: str
    at_most: float = math.inf
    at_least: float = 0.0


class GateFinding(Record):
    """A rule and what it found; `ratio` is None when a case has no figures."""

    rule: str
    ratio: float | None
    ok: bool
    message: str


class GateFile(Record):
    """A list of rules."""

    rule: tuple[GateRule, ...]


def read_gate(text: str, *, where: str) -> tuple[GateRule, ...]:
    """Rules from TOML."""
    try:
        rules = msgspec.toml.decode(text, type=GateFile).rule
    except (msgspec.DecodeError, ValueError) as error:
        raise UsageError(f"not a gate file: {error}", where=where, hint="see benchmarks/method.md") from error
    known = {metric.name for metric in METRICS}
    for rule in rules:
        if rule.metric not in known:
            raise UsageError(f"unknown metric {rule.metric!r}", where=where, hint=f"one of {', '.join(sorted(known))}")
    return rules


def check_gate(result: ResultFile, rules: tuple[GateRule, ...]) -> list[GateFinding]:
    """Each rule against the medians of one run."""
    return [_check(result, rule) for rule in rules]


def _check(result: ResultFile, rule: GateRule) -> GateFinding:
    above, below = (result.samples(key, rule.metric) for key in (rule.case, rule.over))
    if not above or not below:
        missing = rule.case if not above else rule.over
        return GateFinding(rule=rule.name, ratio=None, ok=False, message=f"no figures for '{missing}'")
    ratio = quantile(above, 0.5) / quantile(below, 0.5)
    ok = rule.at_least <= ratio <= rule.at_most
    limits = f"{rule.at_least:g} to {rule.at_most:g}" if math.isfinite(rule.at_most) else f"at least {rule.at_least:g}"
    return GateFinding(rule=rule.name, ratio=ratio, ok=ok, message=f"{ratio:.3f} (allowed: {limits})")
