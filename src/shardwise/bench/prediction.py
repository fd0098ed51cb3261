"""Predictions for the splits of a run, from each device alone and from the links' shapes; nothing of the split itself is used.

    trials of each host alone -> rates of that host -> planner.predict(split) -> TrialResult.predicted

The rates: decode bytes/s = all weights / median compute time of a token alone; compute = FLOPs of the longest prompt /
its prefill time. A split is predicted when every one of its hosts was measured alone. **Fails when** the model is
unknown (`ModelError`). **Called by** `run_command`, after the last trial.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.bench.lab.plan import Host
from shardwise.bench.result import Case, ResultFile, TrialResult
from shardwise.bench.scenario import Network, Scenario
from shardwise.bench.stats import quantile
from shardwise.deploy.options import RunOptions, equal_split, main_quantization
from shardwise.machines.profile import ClusterProfile, LinkProfile, Measurement, NodeProfile, RateTable
from shardwise.model import ModelDescription
from shardwise.model.resolve import describe_model, resolve_model
from shardwise.planner.cost_model import CostModel
from shardwise.planner.predict import predict_with
from shardwise.planner.types import Plan, PlanRequest, Workload
from shardwise.records import plain, replace
from shardwise.transport.shaping import LinkShape

_UNSHAPED_BYTES_PER_S = 1.25e9
_METHOD = "this run, the device alone"


def with_predictions(result: ResultFile, scenario: Scenario) -> ResultFile:
    """The result with `predicted` filled in where it can be."""
    model = describe_model(resolve_model(scenario.model))
    nodes = _calibrated(result, scenario, model)
    trials = []
    for trial in result.trials:
        case = trial.case
        unpredicted = case.asked_from or case.faults or not set(case.hosts) <= set(nodes)
        if case.engine == "shardwise" and len(case.hosts) > 1 and not unpredicted:
            trial = replace(trial, predicted=predict_case(case, scenario, model, nodes))
        trials.append(trial)
    return replace(result, trials=tuple(trials))


def predict_case(case: Case, scenario: Scenario, model: ModelDescription, nodes: dict[str, NodeProfile]) -> dict[str, object]:
    """`planner.predict` for one cell, under the names of `run --json`."""
    network = scenario.network(case.network)
    used = tuple(nodes[name] for name in dict.fromkeys(case.hosts))
    cluster = ClusterProfile(nodes=used, links=tuple(_links(network, used)))
    workload = Workload(
        prompt_tokens=case.prompt_tokens,
        output_tokens=case.output_tokens,
        num_users=case.num_users,
        context_tokens=scenario.context_tokens,
        prefill_chunk_tokens=RunOptions().chunk(main_quantization(model)),
    )
    costs = CostModel(PlanRequest(model=model, cluster=cluster, workload=workload))
    start, stages = 0, []
    for name, count in zip(case.hosts, case.layers or equal_split(model.num_layers, len(case.hosts))):
        stages.append(costs.whole_stage(costs.unit(name, "cpu"), start, start + count, sessions=case.num_users))
        start += count
    found: dict[str, object] = plain(predict_with(costs, Plan(strategy="layer_wise", stages=tuple(stages))))
    return found


def _calibrated(result: ResultFile, scenario: Scenario, model: ModelDescription) -> dict[str, NodeProfile]:
    alone: dict[str, list[TrialResult]] = {}
    for trial in result.trials:
        if len(trial.case.hosts) == 1 and trial.case.num_users == 1 and trial.stages and not trial.case.faults:
            alone.setdefault(trial.case.hosts[0], []).append(trial)
    hosts = {host.name: host for network in scenario.networks for host in network.hosts}
    return {name: _node(hosts[name], trials, model) for name, trials in alone.items() if name in hosts}


def _node(host: Host, trials: Sequence[TrialResult], model: ModelDescription) -> NodeProfile:
    weight_bytes = sum(layer.weight_bytes for layer in model.layers) + model.head_bytes
    decode = [trial.stages[0].compute_s["decode_p50"] for trial in trials if trial.stages[0].compute_s.get("decode_p50")]
    longest = max(trial.case.prompt_tokens for trial in trials)
    prefill = [
        trial.stages[0].compute_s["prefill_total"]
        for trial in trials
        if trial.case.prompt_tokens == longest and trial.stages[0].compute_s.get("prefill_total")
    ]
    flops = sum(layer.flops_per_token for layer in model.layers) * longest
    rate = Measurement(value=weight_bytes / quantile(decode, 0.5), n=len(decode), method=_METHOD)
    compute = Measurement(value=flops / quantile(prefill, 0.5), n=len(prefill), method=_METHOD)
    table = RateTable(
        quantization=main_quantization(model),
        library=_METHOD,
        compute_flops_per_s=compute,
        weight_bytes_per_s=rate,
        layer_fixed_s=Measurement(value=0.0),
    )
    memory_bytes = host.memory_bytes or max(trial.stages[0].memory_limit_bytes for trial in trials) or 2**34
    return NodeProfile(
        name=host.name, memory_bytes=memory_bytes, memory_bytes_per_s=rate, compute_flops_per_s=compute, rates=(table,)
    )


def _links(network: Network, nodes: Sequence[NodeProfile]) -> list[LinkProfile]:
    hosts = {host.name: host for host in network.hosts}
    extra = {(link.source, link.target): link.shape for link in network.links}
    kind = {"wired": "ethernet", "wireless": "wifi"}.get(network.kind, network.kind)
    found = []
    for source in nodes:
        for target in nodes:
            if source.name != target.name:
                path = [hosts[source.name].up, hosts[target.name].down, extra.get((source.name, target.name), LinkShape())]
                found.append(_link(source.name, target.name, path, kind))
    return found


def _link(source: str, target: str, path: Sequence[LinkShape], kind: str) -> LinkProfile:
    """Delays and median jitters add up; the p95 of the sum is taken from the roughest part."""
    rates = [shape.bytes_per_s for shape in path if shape.bytes_per_s]
    middle_s = sum(shape.delay_s + shape.jitter_quantile_s(0.5) for shape in path)
    tail_s = max((shape.jitter_quantile_s(0.95) - shape.jitter_quantile_s(0.5) for shape in path), default=0.0)
    return LinkProfile(
        source=source,
        target=target,
        bytes_per_s=Measurement(value=min(rates, default=_UNSHAPED_BYTES_PER_S)),
        latency_s=Measurement(value=middle_s),
        jitter_p95_s=Measurement(value=tail_s) if tail_s else None,
        kind=kind,
    )
