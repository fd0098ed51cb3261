"""From a result file to what the verdict looks at. Pure.

An option is a split; its contended tail is the worst p95 between tokens over every network and load it was measured on,
its quiet tail the one on the calmest network. Failed trials speak too: out of memory means that it does not fit.
"""

from __future__ import annotations

from shardwise.bench.compare import pooled_parts
from shardwise.bench.result import ResultFile, TrialResult
from shardwise.bench.stats import quantile
from shardwise.bench.verdict import Evidence, Option

_DECODE_TOKENS = 8  # loads with fewer output tokens say nothing about the time between tokens
_CALM = {"loopback": 0, "wired": 1, "wireless": 2, "wan": 3}


def gather_evidence(result: ResultFile) -> Evidence:
    """What was measured of shardwise itself; peers and fault trials do not count."""
    by_split: dict[str, list[TrialResult]] = {}
    for trial in result.trials:
        if trial.case.engine == "shardwise" and not trial.case.faults:
            by_split.setdefault(trial.case.split, []).append(trial)
    options = [_option(result, name, trials) for name, trials in by_split.items()]
    splits = sorted((o for o in options if o.num_nodes > 1), key=lambda o: -o.num_nodes)
    return Evidence(
        target_p95_s=result.target_inter_token_p95_s,
        singles=tuple(o for o in options if o.num_nodes == 1),
        splits=tuple(splits),
        num_users=max((trial.case.num_users for trial in result.trials), default=1),
    )


def _option(result: ResultFile, name: str, trials: list[TrialResult]) -> Option:
    hosts = set(trials[0].case.hosts)
    cases = {trial.case.key: trial.case for trial in trials}
    tails: dict[str, float] = {}  # network -> worst p95
    middles: list[float] = []
    aggregates: list[float] = [0.0]
    calmest = min((case.network_kind for case in cases.values()), key=lambda kind: _CALM[kind])
    quiet: list[float] = []
    most_users = max(case.num_users for case in cases.values())
    for key, case in cases.items():
        p95 = result.samples(key, "inter_token_p95_s")
        if p95 and case.output_tokens >= _DECODE_TOKENS:
            tail = quantile(p95, 0.5)
            tails[case.network] = max(tails.get(case.network, 0.0), tail)
            if case.network_kind == calmest:
                quiet.append(tail)
            if case.num_users == 1:
                middles.append(quantile(result.samples(key, "inter_token_p50_s"), 0.5))
        if case.num_users == most_users:
            aggregates.append(quantile(result.samples(key, "aggregate_tokens_per_s") or [0.0], 0.5))
    link_share, slowest_node, slowest_share = _shares(result, list(cases))
    return Option(
        name=trials[0].case.hosts[0] if len(hosts) == 1 else name,
        num_nodes=len(hosts),
        fits=bool(tails),
        inter_token_p50_s=min(middles, default=0.0),
        contended_p95_s=max(tails.values(), default=0.0),
        quiet_p95_s=max(quiet, default=0.0),
        aggregate_tokens_per_s=max(aggregates),
        link_share=link_share,
        slowest_node=slowest_node,
        slowest_share=slowest_share,
    )


def _shares(result: ResultFile, keys: list[str]) -> tuple[float, str, float]:
    """Share of links in a token's time, and the node with most of the compute time and its share; the worst case's."""
    worst = (0.0, "", 0.0)
    for key in keys:
        medians = {(part.kind, part.where): part.p50_s for part in pooled_parts(result, key)}
        total_s = sum(medians.values())
        compute = {where: value for (kind, where), value in medians.items() if kind == "compute"}
        if not total_s or not compute:
            continue
        link = sum(value for (kind, _), value in medians.items() if kind == "transfer") / total_s
        slowest = max(compute, key=lambda where: compute[where])
        if link >= worst[0] or not worst[1]:
            worst = (link, slowest, compute[slowest] / sum(compute.values()))
    return worst
