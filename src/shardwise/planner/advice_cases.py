"""The cases of the advice: each looks at a `Situation` and says nothing, or what it sees, in words and numbers.

A case is a predicate and a message. Thresholds are constants with their reasons. Nothing here fails.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwise.planner.advice_numbers import Situation, best_single_option, wired
from shardwise.planner.cost_links import link_between
from shardwise.planner.cost_model import CostModel
from shardwise.planner.cuts import boundaries
from shardwise.planner.types import Reason
from shardwise.records import replace
from shardwise.units import format_bytes, format_duration, format_rate

COMMUNICATION_SHARE = 0.35  # of a token on the links: a third of the machines' speed is lost there
AS_FAST = 0.05  # a simpler plan within 5 % of the objective is the better plan
WORTH_A_SMALLER_MODEL = 1.25  # a quarter faster: below that, keep the better weights
SLOW_TOKENS_PER_S = 3.0  # slower than people read
STRONGER_GAIN = 1.5
TAIL = 1.8  # p95 over p50 that people see as stutter
CABLE_BYTES_PER_S, CABLE_LATENCY_S = 125e6, 0.3e-3  # what any home can have: 1 Gbit/s

Case = Callable[[Situation], Reason | None]


def smaller_quantization_only(s: Situation) -> Reason | None:
    """Nothing fits, but a smaller quantization does."""
    if s.feasible:
        return None
    option = s.smaller_single or s.smaller_split
    if option is None:
        return None
    where = option.plan.nodes[0] if len(option.plan.nodes) == 1 else " and ".join(option.plan.nodes)
    return Reason(
        case="smaller_quantization_only",
        message=f"Take {option.model.quantization} instead of {s.cost.model.quantization}: it fits on {where} and gives "
        f"{option.predicted.decode_tokens_per_s:.1f} tokens/s; {s.cost.model.quantization} fits nowhere",
        numbers={
            "quantization": option.model.quantization,
            "weight_bytes": option.model.weight_bytes,
            "decode_tokens_per_s": option.predicted.decode_tokens_per_s,
            "nodes": list(option.plan.nodes),
        },
    )


def memory_short(s: Situation) -> Reason | None:
    """Nothing fits, and it is little that is missing."""
    if s.feasible or not s.together_short_bytes or s.together_short_bytes > s.needed_bytes / 2:
        return None
    return Reason(
        case="memory_short",
        message=f"Add {format_bytes(s.together_short_bytes)} of memory: with that it fits split over all machines",
        numbers={"short_by_bytes": s.together_short_bytes, "needed_bytes": s.needed_bytes},
    )


def nothing_fits(s: Situation) -> Reason | None:
    """No plan at all."""
    if s.feasible:
        return None
    nearest = min(s.misses, key=lambda name: s.misses[name])
    if s.together_short_bytes:
        together = f"all machines together {format_bytes(s.together_short_bytes)}"
    elif len(boundaries(s.cost.model)) == 2:
        together = f"and a {s.cost.model.architecture} model of {s.cost.model.num_layers} layers cannot be cut"
    else:
        together = "and its layers do not divide over the machines' memory"
    return Reason(
        case="nothing_fits",
        message=f"It fits nowhere: it needs {format_bytes(s.needed_bytes)}, '{nearest}' comes nearest and is "
        f"{format_bytes(s.misses[nearest])} short, {together}",
        numbers={
            "needed_bytes": s.needed_bytes,
            "nearest": nearest,
            "short_by_bytes": s.misses[nearest],
            "short_by_bytes_per_node": s.misses,
            "together_short_by_bytes": s.together_short_bytes,
        },
    )


def limits_broken(s: Situation) -> Reason | None:
    """It fits, but no plan keeps to the limits: which, and by how much."""
    if not s.feasible or not s.broken:
        return None
    return Reason(
        case="limits_broken",
        message=f"It fits, but no plan keeps to the limits; the best one ({', '.join(s.plan.nodes)}): {'; '.join(s.broken)}",
        numbers={"broken": list(s.broken), "nodes": list(s.plan.nodes)},
    )


def one_machine_is_best(s: Situation) -> Reason | None:
    """It fits on one machine, and a split would not be better."""
    if not s.feasible or len(s.plan.nodes) > 1:
        return None
    node, rate = s.plan.nodes[0], s.predicted.decode_tokens_per_s
    numbers = {"node": node, "decode_tokens_per_s": rate, "time_to_first_token_s": s.predicted.time_to_first_token_s}
    if s.split is None:
        return Reason(
            case="one_machine_is_best",
            message=f"Do not split it: it fits on {node} ({rate:.1f} tokens/s), and nothing else can take a part",
            numbers=numbers,
        )
    if s.plan.strategy not in ("single_node", "layer_wise"):  # asked for: not compared with what was not asked for
        message = f"It stays on one machine: {s.plan.strategy.replace('_', ' ')} on {node} gives {rate:.1f} tokens/s"
        return Reason(case="one_machine_is_best", message=message, numbers=numbers)
    other, parts = s.split.predicted, s.split.plan.nodes
    how = f"over {', '.join(parts)}" if len(parts) > 1 else "over its devices"
    numbers |= {
        "split_nodes": list(s.split.plan.nodes),
        "split_decode_tokens_per_s": other.decode_tokens_per_s,
        "split_time_to_first_token_s": other.time_to_first_token_s,
    }
    return Reason(
        case="one_machine_is_best",
        message=f"Do not split it: {node} alone gives {rate:.1f} tokens/s, the best split {how} {other.decode_tokens_per_s:.1f}",
        numbers=numbers,
    )


def one_machine_is_as_good(s: Situation) -> Reason | None:
    """A split would be better by so little that it is not worth the trouble."""
    if not s.feasible or len(s.plan.nodes) == 1 or s.single is None or s.plan.objective_value <= 0:
        return None
    gain = s.single.value / s.plan.objective_value - 1.0
    if gain > AS_FAST:
        return None
    node, alone = s.single.plan.nodes[0], s.single.predicted
    return Reason(
        case="one_machine_is_as_good",
        message=f"Do not split it: {node} alone gives {alone.decode_tokens_per_s:.1f} tokens/s, first token after "
        f"{format_duration(alone.time_to_first_token_s)}; the best split is only {gain:.1%} better in all",
        numbers={
            "node": node,
            "gain": gain,
            "decode_tokens_per_s": alone.decode_tokens_per_s,
            "split_decode_tokens_per_s": s.predicted.decode_tokens_per_s,
        },
    )


def copies_are_best(s: Situation) -> Reason | None:
    """Whole copies on several machines: nothing is split."""
    if not s.feasible or s.plan.replicas < 2 or any(len(stages) > 1 for stages in s.plan.pipelines):
        return None
    return Reason(
        case="copies_are_best",
        message=f"Do not split it: {s.plan.replicas} whole copies ({', '.join(s.plan.nodes[:6])}) give "
        f"{s.predicted.aggregate_tokens_per_s:.1f} tokens/s in all",
        numbers={"nodes": list(s.plan.nodes), "aggregate_tokens_per_s": s.predicted.aggregate_tokens_per_s},
    )


def one_machine_is_slower(s: Situation) -> Reason | None:
    """It fits on one machine, but the split is better: by how much."""
    if not s.feasible or len(s.plan.nodes) == 1 or s.single is None or s.single.value <= 0:
        return None
    if s.single.value <= (1 + AS_FAST) * s.plan.objective_value:
        return None
    return Reason(
        case="one_machine_is_slower",
        message=f"It would fit on {s.single.plan.nodes[0]} alone, at {s.single.predicted.decode_tokens_per_s:.1f} tokens/s a "
        f"user and {s.single.predicted.aggregate_tokens_per_s:.1f} in all; the plan gives "
        f"{s.predicted.decode_tokens_per_s:.1f} and {s.predicted.aggregate_tokens_per_s:.1f}",
        numbers={
            "node": s.single.plan.nodes[0],
            "single_objective_s": s.single.value,
            "plan_objective_s": s.plan.objective_value,
            "single_decode_tokens_per_s": s.single.predicted.decode_tokens_per_s,
            "plan_decode_tokens_per_s": s.predicted.decode_tokens_per_s,
        },
    )


def communication_dominates(s: Situation) -> Reason | None:
    """The links take a large share of every token: which one, and what a cable would give."""
    if not s.feasible or not s.predicted.boundaries or s.predicted.communication_share < COMMUNICATION_SHARE:
        return None
    worst = max(s.predicted.boundaries, key=lambda b: b.share_of_token)
    link = link_between(s.cost.cluster, worst.source, worst.target, s.cost.costs)
    cluster = s.cost.cluster
    links = tuple(wired(item, CABLE_BYTES_PER_S, CABLE_LATENCY_S) for item in cluster.links)
    default = wired(cluster.default_link, CABLE_BYTES_PER_S, CABLE_LATENCY_S) if cluster.default_link else None
    better = s.with_links(replace(cluster, links=links, default_link=default))
    return Reason(
        case="communication_dominates",
        message=f"The links take {s.predicted.communication_share:.0%} of every token, {worst.source} -> {worst.target} "
        f"({format_rate(link.bytes_per_s.value, bits=True)}, {format_duration(link.latency_s.value)}) alone "
        f"{worst.share_of_token:.0%}: over 1 Gbit/s cables the same plan gives {better.decode_tokens_per_s:.1f} instead of "
        f"{s.predicted.decode_tokens_per_s:.1f} tokens/s",
        numbers={
            "from": worst.source,
            "to": worst.target,
            "share_of_token": worst.share_of_token,
            "communication_share": s.predicted.communication_share,
            "transfer_s": worst.transfer_s.p50,
            "decode_tokens_per_s": s.predicted.decode_tokens_per_s,
            "decode_tokens_per_s_over_cable": better.decode_tokens_per_s,
        },
    )


def smaller_quantization_fits_one(s: Situation) -> Reason | None:
    """Split as it is; at a smaller quantization one machine is enough and clearly faster."""
    if not s.feasible or s.plan.strategy == "single_node" or s.single is not None or s.smaller_single is None:
        return None
    option = s.smaller_single
    if option.predicted.decode_tokens_per_s < WORTH_A_SMALLER_MODEL * s.predicted.decode_tokens_per_s:
        return None
    return Reason(
        case="smaller_quantization_fits_one",
        message=f"At {option.model.quantization} it fits on {option.plan.nodes[0]} alone: "
        f"{option.predicted.decode_tokens_per_s:.1f} tokens/s instead of {s.predicted.decode_tokens_per_s:.1f} split",
        numbers={
            "quantization": option.model.quantization,
            "node": option.plan.nodes[0],
            "weight_bytes": option.model.weight_bytes,
            "decode_tokens_per_s": option.predicted.decode_tokens_per_s,
            "split_decode_tokens_per_s": s.predicted.decode_tokens_per_s,
        },
    )


def coarser_is_as_fast(s: Situation) -> Reason | None:
    """Fewer stages give the same: fewer machines to keep awake."""
    if not s.feasible or s.plan.strategy != "layer_wise" or s.coarser is None or s.plan.objective_value <= 0:
        return None
    loss = s.coarser.value / s.plan.objective_value - 1.0
    if s.cost.request.objective.kind == "fit" or loss > AS_FAST:
        return None
    return Reason(
        case="coarser_is_as_fast",
        message=f"Split it over {' and '.join(s.coarser.plan.nodes)} in {len(s.coarser.plan.stages)} stages: "
        f"{s.coarser.predicted.decode_tokens_per_s:.1f} tokens/s. The best plan has {len(s.plan.stages)} stages and is only "
        f"{loss:.1%} better in all, with more that can fail (--max-stages {len(s.coarser.plan.stages)} leaves it out)",
        numbers={
            "num_stages": len(s.coarser.plan.stages),
            "nodes": list(s.coarser.plan.nodes),
            "loss": loss,
            "decode_tokens_per_s": s.coarser.predicted.decode_tokens_per_s,
        },
    )


def stronger_machine(s: Situation) -> Reason | None:
    """Split and still slow: one machine as fast as the best one, with enough memory, would do better."""
    if not s.feasible or s.plan.strategy == "single_node" or s.single is not None:
        return None
    if s.predicted.decode_tokens_per_s >= SLOW_TOKENS_PER_S:
        return None
    unit = max(s.cost.units, key=lambda u: u.device.memory_bytes_per_s.value)
    alone = _with_memory(s, unit.node.name, s.needed_bytes)
    gain = alone / s.predicted.decode_tokens_per_s
    if gain < STRONGER_GAIN:
        return None
    return Reason(
        case="stronger_machine",
        message=f"{s.predicted.decode_tokens_per_s:.1f} tokens/s is all these machines give together; one like "
        f"'{unit.node.name}' with {format_bytes(s.needed_bytes)} would give {alone:.1f}",
        numbers={"decode_tokens_per_s": s.predicted.decode_tokens_per_s, "stronger": alone, "memory_bytes": s.needed_bytes},
    )


def _with_memory(s: Situation, node_name: str, memory_bytes: int) -> float:
    """Decode rate of one machine like `node_name` with more memory."""
    node = s.cost.cluster.node(node_name)
    devices = tuple(replace(d, memory_bytes=max(d.memory_bytes, memory_bytes)) for d in node.devices)
    grown = replace(node, memory_bytes=max(node.memory_bytes, memory_bytes), devices=devices)
    alone = replace(s.cost.cluster, nodes=(grown,), links=())
    option = best_single_option(CostModel(replace(s.cost.request, cluster=alone), s.cost.costs))
    return option.predicted.decode_tokens_per_s if option else 0.0


def stronger_beats_weak(s: Situation) -> Reason | None:
    """One strong machine beats two weak ones together."""
    if not s.feasible or s.plan.strategy != "single_node" or s.split is None:
        return None
    weak = [name for name in s.split.plan.nodes if name != s.plan.nodes[0]]
    if len(weak) < 2:
        return None
    return Reason(
        case="stronger_beats_weak",
        message=f"{s.plan.nodes[0]} alone beats {' and '.join(weak)} together: {s.predicted.decode_tokens_per_s:.1f} against "
        f"{s.split.predicted.decode_tokens_per_s:.1f} tokens/s",
        numbers={"node": s.plan.nodes[0], "weak": weak, "split_decode_tokens_per_s": s.split.predicted.decode_tokens_per_s},
    )


def wifi_tail(s: Situation) -> Reason | None:
    """A radio link makes the slowest tokens much slower than the usual ones, or breaks the wanted p95."""
    if not s.feasible or not s.predicted.boundaries:
        return None
    gaps, limit = s.predicted.inter_token_s, s.cost.request.limits.max_inter_token_p95_s
    radio = []
    for boundary in s.predicted.boundaries:
        link = link_between(s.cost.cluster, boundary.source, boundary.target, s.cost.costs)
        if link.kind == "wifi":
            radio.append(f"{boundary.source} -> {boundary.target}")
    if not radio or (gaps.p95 <= TAIL * gaps.p50 and not (limit is not None and gaps.p95 > limit)):
        return None
    wanted = f", wanted {format_duration(limit)}" if limit is not None else ""
    return Reason(
        case="wifi_tail",
        message=f"Put a cable where the Wi-Fi is ({radio[0]}): one token in twenty takes {format_duration(gaps.p95)} or more, "
        f"the usual one {format_duration(gaps.p50)}{wanted}",
        numbers={"links": radio, "p50_s": gaps.p50, "p95_s": gaps.p95, "limit_s": limit},
    )


def no_spare_copy(s: Situation) -> Reason | None:
    """If one machine goes, the plan stops: what a second copy of its stage would cost."""
    if not s.feasible or s.plan.replicas > 1 or len(s.plan.nodes) < 2:
        return None
    heaviest = max(s.plan.stages, key=lambda st: sum(r.total_bytes for r in st.ranks))
    lightest = min(s.plan.stages, key=lambda st: sum(r.total_bytes for r in st.ranks))
    low, high = (sum(r.total_bytes for r in st.ranks) for st in (lightest, heaviest))
    up = f"; all machines are up {s.predicted.availability:.1%} of the time" if s.predicted.availability < 1 else ""
    return Reason(
        case="no_spare_copy",
        message=f"No stage has a spare copy: when one of {len(s.plan.nodes)} machines goes, answers stop until its layers are "
        f"loaded elsewhere. A copy costs {format_bytes(low)} to {format_bytes(high)} of memory{up}",
        numbers={
            "availability": s.predicted.availability,
            "replica_bytes": [
                {"layers": list(st.layers), "node": st.node, "bytes": sum(r.total_bytes for r in st.ranks)}
                for st in s.plan.stages
            ],
        },
    )


def better_left_out(s: Situation) -> Reason | None:
    """Machines that the plan leaves out because they would slow the rest."""
    if not s.feasible or s.cost.request.objective.kind == "fit":
        return None
    names = {node.name for node in s.cost.cluster.nodes}
    idle = sorted(names - set(s.plan.nodes))
    if not idle or len(s.plan.nodes) == len(names):
        return None
    slow = {u.node.name: u.device.memory_bytes_per_s.value for u in s.cost.units if u.node.name in idle}
    listed = ", ".join(f"{name} ({format_rate(slow[name])})" for name in idle[:4])
    return Reason(
        case="better_left_out",
        message=f"Leave out {listed}{' and others' if len(idle) > 4 else ''}: taking part would not make the plan better",
        numbers={"nodes": idle},
    )


def paging_is_a_cliff(s: Situation) -> Reason | None:
    """What running it on the largest machine alone would mean although it does not fit."""
    if s.single is not None or (s.feasible and s.plan.strategy == "single_node"):
        return None
    unit = max(s.cost.units, key=lambda u: u.device.memory_bytes if u.device.kind == "cpu" else 0)
    if unit.device.kind != "cpu":
        return None
    paged = s.whole_on(unit)
    return Reason(
        case="paging_is_a_cliff",
        message=f"Running it on {unit.node.name} alone would read the weights from disk for every token: "
        f"{paged.decode_tokens_per_s:.2f} tokens/s",
        numbers={"node": unit.node.name, "decode_tokens_per_s": paged.decode_tokens_per_s},
    )


CASES: tuple[Case, ...] = (
    smaller_quantization_only,
    memory_short,
    nothing_fits,
    limits_broken,
    one_machine_is_best,
    copies_are_best,
    one_machine_is_as_good,
    one_machine_is_slower,
    stronger_beats_weak,
    wifi_tail,
    communication_dominates,
    smaller_quantization_fits_one,
    coarser_is_as_fast,
    stronger_machine,
    no_spare_copy,
    better_left_out,
    paging_is_a_cliff,
)
