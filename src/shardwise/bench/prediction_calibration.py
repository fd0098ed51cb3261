"""What is known before the matrix runs: this machine's layers, its runtime's own costs, the links. Nothing of the matrix.

    probe of real layers and the head -> rates; short runs of one and two stages on loopback -> `RuntimeCosts`; pings -> links

The short runs have prompts of 256 and 1,664 tokens, which no cell has; what can be told from one stage is told from one stage.
**Fails with** the errors of the probe and of deployments. **Called by** `prediction_matrix`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from shardwise.bench.prediction_link import measure_link
from shardwise.bench.prediction_runs import OUTPUT_TOKENS, RunFigures, Runs, short_runs
from shardwise.bench.scenario import Scenario
from shardwise.clock import SystemClock
from shardwise.cluster.machine import usable_memory_bytes
from shardwise.deploy.options import RunOptions, main_quantization
from shardwise.machines.profile import ClusterProfile, LayerTiming, LinkProfile, Measurement, NodeProfile, RateTable
from shardwise.model.description import ModelDescription
from shardwise.planner.cost_compute import StepShape, head_s
from shardwise.planner.cost_memory import mapped_bytes, workspace_bytes
from shardwise.planner.cost_model import CostModel
from shardwise.planner.cost_rates import RuntimeCosts
from shardwise.planner.predict import prefill_chunks
from shardwise.planner.types import Plan, PlanRequest, Workload
from shardwise.probe.for_model import ModelProbe, model_rates
from shardwise.probe.link_task import LinkSettings
from shardwise.processors import usable_cores
from shardwise.records import Record, replace

MACHINE = "this machine"
_LEAST_S = 10e-6


class Calibration(Record):
    """Everything that predictions are made of."""

    node: NodeProfile  # every host of the matrix is one of these, on one machine
    costs: RuntimeCosts
    links: dict[str, LinkProfile]  # by network

    def cluster(self, hosts: tuple[str, ...], network: str) -> ClusterProfile:
        """The hosts of a case; they share this machine's cores."""
        nodes = tuple(replace(self.node, name=name) for name in dict.fromkeys(hosts))
        return ClusterProfile(nodes=nodes, default_link=self.links[network])


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
    say("one stage and two")
    runs = short_runs(model, scenario)
    node = NodeProfile(
        name=MACHINE,
        memory_bytes=usable_memory_bytes(),
        memory_bytes_per_s=rates[0].weight_bytes_per_s,
        compute_flops_per_s=rates[0].compute_flops_per_s,
        num_cores=usable_cores(),
        machine=MACHINE,
        rates=rates,
    )
    return fit(model, scenario, node, links, runs)


def fit(model: ModelDescription, scenario: Scenario, node: NodeProfile, links: dict[str, LinkProfile], runs: Runs) -> Calibration:
    """The runtime's costs: what the short runs took beyond the layers, and how much slower layers are inside a stage.

    A stage's step is `inside + layers + head`: two stages pay `inside` once more than one does. What a token takes beside
    computing is `around` a stage by its own trace, sampling once, and the hops: what is left of the time between two tokens.
    """
    one, two, pair = runs.one, runs.two, runs.pair
    link = links["loopback"]
    cost = _cost_model(model, node, link, one.prompt_tokens)
    inside_s = min(max(0.0, statistics.median(runs.inside_s)), one.decode_s[0] / 10)
    beyond_layers_s = inside_s + head_s(model, cost.unit(MACHINE, "cpu").device, 1)
    node = _scaled(
        node,
        _scales(
            model, node, link, runs, (one.decode_s[0] - beyond_layers_s, runs.far.decode_s[0] - beyond_layers_s), decode=True
        ),
        _scales(model, node, link, runs, (one.prefill_s[0], runs.far.prefill_s[0]), decode=False),
    )
    beside_one, beside_two = one.gap_s - one.decode_s[0], two.gap_s - sum(two.decode_s)
    step_s = max(_LEAST_S, two.around_s[0])  # the last stage samples besides
    sample_s = max(_LEAST_S, beside_one - step_s)
    hop_s = (beside_two - 2 * step_s - sample_s) / 2
    costs = RuntimeCosts(
        step_overhead_s=inside_s + step_s,
        row_overhead_s=_LEAST_S,
        sample_row_s=sample_s,
        message_cpu_s=max(0.0, statistics.mean(two.beside_cpu_s) - step_s - sample_s / len(two.layers)),
        driver_cpu_s=two.driver_cpu_s,
        message_overhead_s=max(_LEAST_S, (one.first_token_s - sum(one.prefill_s) - max(0.0, beside_one)) / 2),
        process_bytes=_process_bytes(model, scenario, cost, two),
        service_jitter=min(0.5, one.jitter),
        shared_speed=min(1.0, statistics.mean(a / b for a, b in zip(two.decode_s, pair.decode_s))),
    )
    return Calibration(
        node=node, costs=costs, links={name: _as_in_a_ring(each, hop_s - link.latency_s.value) for name, each in links.items()}
    )


def _as_in_a_ring(link: LinkProfile, more_s: float) -> LinkProfile:
    """A link as a stage's messages find it: `more_s` is what a hop between stages on loopback takes beyond a ping there.

    Pings go out now and then from an idle process, whose core has to wake up (0.15 to 0.3 ms on loopback, from run to run).
    """
    latency_s = max(_LEAST_S, link.latency_s.value + more_s)
    return replace(link, latency_s=replace(link.latency_s, value=latency_s))


def _process_bytes(model: ModelDescription, scenario: Scenario, cost: CostModel, two: RunFigures) -> int:
    """What a worker holds beside weights, KV and buffers."""
    reserved = replace(cost.workload, num_users=1, context_tokens=scenario.context_tokens)
    last = [end == model.num_layers for _, end in two.layers]
    buffers = [workspace_bytes(model, reserved, RuntimeCosts(process_bytes=0), last=is_last) for is_last in last]
    mapped = [mapped_bytes(model, *layers) for layers in two.layers]
    own = [m - w - k - b + e for m, w, k, b, e in zip(two.memory_bytes, two.weight_bytes, two.kv_bytes, buffers, mapped)]
    return max(0, round(statistics.mean(own)))


def _scales(
    model: ModelDescription,
    node: NodeProfile,
    link: LinkProfile,
    runs: Runs,
    measured_s: tuple[float, float],
    *,
    decode: bool,
) -> tuple[float, float]:
    """How many times longer than probed (layers, what they do with the cache) take inside a stage.

    Two prompts, two unknowns: `x * layers + y * cache = measured`; y within a half and two.
    """
    bare = replace(node, rates=tuple(_without_cache(table) for table in node.rates))
    layers_s, cache_s = [], []
    for run in (runs.one, runs.far):
        cost, plain = (_cost_model(model, each, link, run.prompt_tokens) for each in (node, bare))
        layers_s.append(_layers_s(plain, run.layers[0], decode=decode))
        cache_s.append(_layers_s(cost, run.layers[0], decode=decode) - layers_s[-1])
    determinant = layers_s[0] * cache_s[1] - layers_s[1] * cache_s[0]
    found = (layers_s[0] * measured_s[1] - layers_s[1] * measured_s[0]) / determinant if determinant > 0 else 1.0
    cache = min(2.0, max(0.5, found))
    return (measured_s[0] - cache * cache_s[0]) / layers_s[0], cache


def _without_cache(table: RateTable) -> RateTable:
    endless = Measurement(value=1e30)
    if table.quantization.startswith("KV_"):
        return replace(table, weight_bytes_per_s=endless)
    return replace(table, attention_flops_per_s=endless)


def _scaled(node: NodeProfile, decode: tuple[float, float], prefill: tuple[float, float]) -> NodeProfile:
    table, kv, *others = node.rates
    timings = tuple(
        LayerTiming(rows=t.rows, layer_s=replace(t.layer_s, value=t.layer_s.value * (decode if t.rows <= 8 else prefill)[0]))
        for t in table.timings
    )
    attention = table.attention_flops_per_s
    slower = replace(attention, value=attention.value / prefill[1]) if attention else None
    table = replace(table, timings=timings, attention_flops_per_s=slower)
    rate = kv.weight_bytes_per_s
    return replace(node, rates=(table, replace(kv, weight_bytes_per_s=replace(rate, value=rate.value / decode[1])), *others))


def _cost_model(model: ModelDescription, node: NodeProfile, link: LinkProfile, prompt_tokens: int) -> CostModel:
    workload = Workload(
        prompt_tokens=prompt_tokens,
        output_tokens=OUTPUT_TOKENS,
        prefill_chunk_tokens=RunOptions().chunk(main_quantization(model)),
    )
    cluster = ClusterProfile(nodes=(node,), default_link=link)
    return CostModel(PlanRequest(model=model, cluster=cluster, workload=workload), RuntimeCosts())


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
