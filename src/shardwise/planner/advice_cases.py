"""The cases of the advice: each looks at a `Situation` and says nothing, or what it sees, in words and numbers.

A case is a predicate and a message. Thresholds are constants with their reasons. Nothing here fails.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwise.planner.advice_machines import (
    AS_FAST,
    copies_are_best,
    one_machine_is_as_good,
    one_machine_is_best,
    one_machine_is_slower,
    paging_is_a_cliff,
    stronger_beats_weak,
    stronger_machine,
)
from shardwise.planner.advice_numbers import Option, Situation, wired
from shardwise.planner.borrowed_rates import borrowed_rates
from shardwise.planner.cost_links import link_between
from shardwise.planner.cuts import boundaries
from shardwise.planner.machine_plans import machines, place
from shardwise.planner.rejections import misses_in_words
from shardwise.planner.types import Reason
from shardwise.records import replace
from shardwise.units import format_bytes, format_duration, format_rate

COMMUNICATION_SHARE = 0.35  # of a token on the links: a third of the machines' speed is lost there
WORTH_A_SMALLER_MODEL = 1.25  # a quarter faster: below that, keep the better weights
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
    where = place(s.cost, option.plan)
    return Reason(
        case="smaller_quantization_only",
        message=f"Take {option.model.quantization} instead of {s.cost.model.quantization}: it fits on {where} and gives "
        f"{option.predicted.decode_tokens_per_s:.1f} tokens/s; {s.cost.model.quantization} fits nowhere{_borrowed(s, option)}",
        numbers={
            "quantization": option.model.quantization,
            "weight_bytes": option.model.weight_bytes,
            "decode_tokens_per_s": option.predicted.decode_tokens_per_s,
            "nodes": list(option.plan.nodes),
        },
    )


def _borrowed(s: Situation, option: Option) -> str:
    """That the rate of another quantization stands behind a figure."""
    taken = sorted({name for one in borrowed_rates(s.cost_of(option.model), option.plan) for name in one.taken})
    return f" (by the measured rate of {' and '.join(taken)})" if taken else ""


def memory_short(s: Situation) -> Reason | None:
    """Nothing fits, and it is little that is missing."""
    if s.feasible or not s.together_short_bytes or s.together_short_bytes > s.needed_bytes / 2:
        return None
    names = list(s.misses)
    where = "split over all machines" if len(names) > 1 else f"on {names[0]}"
    return Reason(
        case="memory_short",
        message=f"Add {format_bytes(s.together_short_bytes)} of memory: with that it fits {where}",
        numbers={"short_by_bytes": s.together_short_bytes, "needed_bytes": s.needed_bytes},
    )


def nothing_fits(s: Situation) -> Reason | None:
    """No plan at all."""
    if s.feasible:
        return None
    nearest = min(s.misses, key=lambda name: s.misses[name])
    together = ""
    if len(s.misses) > 1 and s.together_short_bytes:
        together = f"; all together {format_bytes(s.together_short_bytes)}"
    elif len(s.cost.units) > 1 and len(boundaries(s.cost.model)) == 2:
        together = f"; and a {s.cost.model.architecture} model of {s.cost.model.num_layers} layers cannot be cut"
    elif len(s.misses) > 1:
        together = "; and its layers do not divide over the machines' memory"
    return Reason(
        case="nothing_fits",
        message=f"It fits nowhere: it needs {format_bytes(s.needed_bytes)}; alone each machine is short by: "
        f"{misses_in_words(s.misses)}{together}",
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
    """Split as it is; at a smaller quantization one machine is enough, or one device of it, and clearly faster."""
    if not s.feasible or len(s.plan.stages) == 1 or (s.single is not None and len(s.single.plan.stages) == 1):
        return None
    option = s.smaller_faster(WORTH_A_SMALLER_MODEL * s.predicted.decode_tokens_per_s)
    if option is None or (len(s.plan.nodes) == 1 and len(option.plan.stages) > 1):
        return None
    return Reason(
        case="smaller_quantization_fits_one",
        message=f"At {option.model.quantization} it fits on {place(s.cost, option.plan)} alone: "
        f"{option.predicted.decode_tokens_per_s:.1f} tokens/s instead of {s.predicted.decode_tokens_per_s:.1f} split"
        f"{_borrowed(s, option)}",
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
    if s.cost.request.objective.kind == "fit" or loss > AS_FAST or not s.keeps_limits(s.coarser):
        return None
    stages, where = len(s.coarser.plan.stages), place(s.cost, s.coarser.plan)
    what = f"Split it over {where} in {stages} stages" if len(s.coarser.plan.nodes) > 1 else f"Leave it on {where}"
    return Reason(
        case="coarser_is_as_fast",
        message=f"{what}: {s.coarser.predicted.decode_tokens_per_s:.1f} tokens/s (--max-stages {stages}). A plan with "
        f"{len(s.plan.stages)} stages is only {loss:.1%} better in all, with more that can fail (--best)",
        numbers={
            "num_stages": stages,
            "nodes": list(s.coarser.plan.nodes),
            "loss": loss,
            "decode_tokens_per_s": s.coarser.predicted.decode_tokens_per_s,
            "finer_num_stages": len(s.plan.stages),
            "finer_nodes": list(s.plan.nodes),
            "finer_decode_tokens_per_s": s.predicted.decode_tokens_per_s,
        },
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
    units = machines(s.cost)
    slow = {name: max(unit.device.memory_bytes_per_s.value for unit in units[name]) for name in idle if name in units}
    idle = [name for name in idle if name in slow]  # a machine without any memory has no units
    listed = ", ".join(f"{name} ({format_rate(slow[name])})" for name in idle[:4])
    return Reason(
        case="better_left_out",
        message=f"Leave out {listed}{' and others' if len(idle) > 4 else ''}: taking part would not make the plan better",
        numbers={"nodes": idle},
    )


def rates_are_borrowed(s: Situation) -> Reason | None:
    """The prediction takes rates that were measured with another quantization."""
    borrowed = borrowed_rates(s.cost, s.plan) if s.feasible else ()
    if not borrowed:
        return None
    words = [f"the rate of {' and '.join(one.taken)} was used for {one.quantization} on {one.where}" for one in borrowed]
    text = "; ".join(words[:3]) + (f"; and {len(words) - 3} more" if len(words) > 3 else "")
    return Reason(
        case="rates_are_borrowed",
        message=f"{text[0].upper()}{text[1:]}: that can be 2 to 4 times off; measure it with 'shardwise probe --model FILE'",
        numbers={
            "rates": [
                {"node": one.node, "device": one.device, "quantization": one.quantization, "taken": list(one.taken)}
                for one in borrowed
            ]
        },
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
    rates_are_borrowed,
)
