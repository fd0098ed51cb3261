"""What is known before the matrix runs: this machine's layers, its runtime's own costs, the links. Nothing of the matrix.

    probe of real layers -> rates; one short run each of one and two stages on loopback -> `RuntimeCosts`; pings -> links

The short runs have a prompt of 300 tokens, which no cell has. **Fails with** the errors of the probe and of deployments.
**Called by** `prediction_matrix`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from shardwise.bench.agent import UserRun
from shardwise.bench.prediction_link import measure_link
from shardwise.bench.prompts import prompt_ids
from shardwise.bench.scenario import Scenario
from shardwise.bench.stats import quantile
from shardwise.clock import SystemClock
from shardwise.cluster.machine import usable_cores, usable_memory_bytes
from shardwise.deploy import Deployment, launch_local
from shardwise.deploy.options import RunOptions, main_quantization
from shardwise.errors import ReplyTimeout
from shardwise.machines.profile import ClusterProfile, LayerTiming, LinkProfile, Measurement, NodeProfile, RateTable
from shardwise.model.description import ModelDescription
from shardwise.planner.cost_compute import StepShape
from shardwise.planner.cost_memory import mapped_bytes, workspace_bytes
from shardwise.planner.cost_model import CostModel
from shardwise.planner.cost_rates import RuntimeCosts
from shardwise.planner.predict import prefill_chunks
from shardwise.planner.types import Plan, PlanRequest, Workload
from shardwise.probe.for_model import ModelProbe, model_rates
from shardwise.probe.link_task import LinkSettings
from shardwise.records import Record, replace
from shardwise.session.request import GenerationRequest
from shardwise.transport.messages import Stats

PROMPT_TOKENS, OUTPUT_TOKENS = 300, 64
MACHINE = "this machine"
_LEAST_S = 10e-6
_TIMEOUT_S = 300.0


class Calibration(Record):
    """Everything that predictions are made of."""

    node: NodeProfile  # every host of the matrix is one of these, on one machine
    costs: RuntimeCosts
    links: dict[str, LinkProfile]  # by network

    def cluster(self, hosts: tuple[str, ...], network: str) -> ClusterProfile:
        """The hosts of a case; they share this machine's cores."""
        nodes = tuple(replace(self.node, name=name) for name in dict.fromkeys(hosts))
        return ClusterProfile(nodes=nodes, default_link=self.links[network])


class RunFigures(Record):
    """One short run."""

    gap_s: float  # median between tokens
    jitter: float
    first_token_s: float
    decode_s: tuple[float, ...]  # per stage, median step
    prefill_s: tuple[float, ...]  # per stage, one prompt
    memory_bytes: tuple[int, ...]
    weight_bytes: tuple[int, ...]
    kv_bytes: tuple[int, ...]
    layers: tuple[tuple[int, int], ...]


def calibrate(model: ModelDescription, scenario: Scenario, cache: Path, say: Callable[[str], None]) -> Calibration:
    """Measure for about a minute on a free machine."""
    say("layers of the model")
    chunk = RunOptions().chunk(main_quantization(model))
    probe = ModelProbe(
        threads=scenario.num_threads,
        budget_s=10.0,
        layers=10,
        decode_rows=(1, 2, 4),
        prefill_rows=(chunk, 32, 64, 100),
        context_tokens=1024,
        fresh=True,
        kernel="matrix",
    )
    rates = model_rates(model, probe, cache, SystemClock())
    links = {}
    for network in scenario.networks:
        say(f"link of network {network.name}")
        links[network.name] = measure_link(network, LinkSettings(sparse_s=0.0, loaded_s=0.0))
    say("one stage, then two")
    runs = {count: short_run(model, scenario, count) for count in (1, 2)}
    pair = short_run(model, scenario, 2, users=2)
    node = NodeProfile(
        name=MACHINE,
        memory_bytes=usable_memory_bytes(),
        memory_bytes_per_s=rates[0].weight_bytes_per_s,
        compute_flops_per_s=rates[0].compute_flops_per_s,
        num_cores=usable_cores(),
        machine=MACHINE,
        rates=rates,
    )
    return fit(model, scenario, node, links, runs[1], runs[2], pair)


def short_run(model: ModelDescription, scenario: Scenario, num_stages: int, users: int = 1) -> RunFigures:
    """A deployment on loopback with the matrix's settings, warmed up, measured once."""
    with launch_local(
        model,
        num_stages=num_stages,
        context_tokens=scenario.context_tokens,
        max_sessions=4,
        threads=scenario.num_threads,
        probe_interval_s=0.0,
    ) as deployment:
        _users(deployment, users, 8)
        deployment.stats(reset=True)
        done = _users(deployment, users, OUTPUT_TOKENS)
        stats = deployment.stats()
        gaps = [b - a for run in done for a, b in zip(run.arrived_s[1:], run.arrived_s[2:])]
        statuses = deployment.stages
    middle = quantile(gaps, 0.5)
    return RunFigures(
        gap_s=middle,
        jitter=max(0.01, (quantile(gaps, 0.9) / middle - 1.0) / 1.28),
        first_token_s=min(run.arrived_s[0] - run.started_s for run in done),
        decode_s=tuple(s.decode.p50 for s in stats),
        prefill_s=tuple(s.prefill.total / users for s in stats),
        memory_bytes=_memory(stats),
        weight_bytes=tuple(s.weight_bytes for s in statuses),
        kv_bytes=tuple(s.kv_bytes for s in statuses),
        layers=tuple(s.layers for s in statuses),
    )


def _memory(stats: list[Stats]) -> tuple[int, ...]:
    return tuple(s.peak_memory_bytes for s in stats)


def _users(deployment: Deployment, users: int, max_tokens: int) -> list[UserRun]:
    runs = []
    for number in range(users):
        ids = prompt_ids(deployment.tokenizer, PROMPT_TOKENS, number)
        run = UserRun(number)
        runs.append(run)
        deployment.submit(GenerationRequest(prompt=ids, max_tokens=max_tokens, ignore_eos=True), run.on_event)
    for run in runs:
        if not run.ended.wait(_TIMEOUT_S):
            raise ReplyTimeout(f"a calibration run did not end within {_TIMEOUT_S:.0f} s", where="bench")
        if run.error is not None:
            raise run.error
    return runs


def fit(
    model: ModelDescription,
    scenario: Scenario,
    node: NodeProfile,
    links: dict[str, LinkProfile],
    one: RunFigures,
    two: RunFigures,
    pair: RunFigures,
) -> Calibration:
    """The runtime's costs: what the short runs took beyond the layers, and how much slower layers are inside a stage."""
    cost = _cost_model(model, node, links["loopback"], RuntimeCosts())
    plain = two.layers[0]
    decode_scale = two.decode_s[0] / _layers_s(cost, plain, decode=True)
    prefill_scale = two.prefill_s[0] / _layers_s(cost, plain, decode=False)
    table, kv = node.rates
    scaled = _scaled(table, decode_scale, prefill_scale)
    beyond_s = two.decode_s[1] - decode_scale * _layers_s(cost, two.layers[1], decode=True)
    as_layers_s = model.head_bytes * scaled.timings[0].layer_s.value / scaled.timing_layer_bytes
    head_s = min(max(beyond_s, as_layers_s / 2), 2 * as_layers_s)  # noise must not make it free, or rule
    scaled = replace(scaled, weight_bytes_per_s=Measurement(value=model.head_bytes / head_s, method="head of a short run"))
    kv = replace(kv, weight_bytes_per_s=Measurement(value=kv.weight_bytes_per_s.value / decode_scale, method="scaled as layers"))
    hop_s = links["loopback"].latency_s.value
    beside_one = one.gap_s - sum(one.decode_s)
    beside_two = two.gap_s - sum(two.decode_s) - 2 * hop_s
    step_s = max(_LEAST_S, beside_two - beside_one)
    reserved = replace(cost.workload, num_users=1, context_tokens=scenario.context_tokens)
    last = [end == model.num_layers for _, end in two.layers]
    buffers = [workspace_bytes(model, reserved, RuntimeCosts(process_bytes=0), last=is_last) for is_last in last]
    mapped = [mapped_bytes(model, *layers) for layers in two.layers]
    own = [m - w - k - b + e for m, w, k, b, e in zip(two.memory_bytes, two.weight_bytes, two.kv_bytes, buffers, mapped)]
    costs = RuntimeCosts(
        step_overhead_s=step_s,
        row_overhead_s=_LEAST_S,
        sample_row_s=max(_LEAST_S, beside_one - step_s),
        message_overhead_s=max(_LEAST_S, (one.first_token_s - sum(one.prefill_s) - max(0.0, beside_one)) / 2),
        process_bytes=max(0, round(statistics.mean(own))),
        service_jitter=min(0.5, two.jitter),
        shared_speed=min(1.0, two.decode_s[0] / max(1e-9, pair.decode_s[0])),
    )
    return Calibration(node=replace(node, rates=(scaled, kv)), costs=costs, links=links)


def _scaled(table: RateTable, decode: float, prefill: float) -> RateTable:
    timings = tuple(
        LayerTiming(rows=t.rows, layer_s=replace(t.layer_s, value=t.layer_s.value * (decode if t.rows <= 8 else prefill)))
        for t in table.timings
    )
    attention = table.attention_flops_per_s
    slower = replace(attention, value=attention.value / prefill) if attention else None
    return replace(table, timings=timings, attention_flops_per_s=slower)


def _cost_model(model: ModelDescription, node: NodeProfile, link: LinkProfile, costs: RuntimeCosts) -> CostModel:
    workload = Workload(
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        prefill_chunk_tokens=RunOptions().chunk(main_quantization(model)),
    )
    cluster = ClusterProfile(nodes=(node,), default_link=link)
    return CostModel(PlanRequest(model=model, cluster=cluster, workload=workload), costs)


def _layers_s(cost: CostModel, layers: tuple[int, int], *, decode: bool) -> float:
    """Seconds that the layers alone should take: one decode step, or the whole prompt."""
    unit = cost.unit(cost.cluster.nodes[0].name, "cpu")
    workload = cost.workload
    if decode:
        shapes = [StepShape.decode(1, workload.mean_context_tokens)]
    else:
        chunks = prefill_chunks(workload.prompt_tokens, workload.prefill_chunk_tokens)
        shapes = [StepShape.prefill(tokens, at) for at, tokens in chunks]
    prefixes = [cost.layer_prefix_s(unit, shape) for shape in shapes]
    return float(sum(prefix[layers[1]] - prefix[layers[0]] for prefix in prefixes))


def plan_for(cost: CostModel, hosts: tuple[str, ...], layers: tuple[tuple[int, int], ...], sessions: int) -> Plan:
    """The stages of a case."""
    stages = [cost.whole_stage(cost.unit(host, "cpu"), *run, sessions=sessions) for host, run in zip(hosts, layers)]
    return Plan(strategy="layer_wise" if len(stages) > 1 else "single_node", stages=tuple(stages))
