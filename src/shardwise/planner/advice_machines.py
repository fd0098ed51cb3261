"""The cases of the advice that weigh one machine against several. A machine means all of its devices, everywhere.

Each looks at a `Situation` and says nothing, or what it sees, in words and numbers. Nothing here fails.
"""

from __future__ import annotations

from shardwise.planner.advice_numbers import Option, Situation, best_single_option
from shardwise.planner.cost_model import CostModel
from shardwise.planner.machine_plans import machines, place
from shardwise.planner.types import Prediction, Reason
from shardwise.planner.units import Unit
from shardwise.records import replace
from shardwise.units import format_bytes, format_duration

AS_FAST = 0.05  # a simpler plan within 5 % of the objective is the better plan
WORTH_SLOWER_TOKENS = 0.10  # a split that makes each user's tokens slower must save a tenth of the whole
SLOW_TOKENS_PER_S = 3.0  # slower than people read
STRONGER_GAIN = 1.5


def one_machine_is_best(s: Situation) -> Reason | None:
    """It fits on one machine, and a split over several would not be better."""
    if not s.feasible or len(s.plan.nodes) > 1:
        return None
    node, rate = s.plan.nodes[0], s.predicted.decode_tokens_per_s
    numbers = {"node": node, "decode_tokens_per_s": rate, "time_to_first_token_s": s.predicted.time_to_first_token_s}
    numbers["devices"] = list(dict.fromkeys(rank.device for stage in s.plan.stages for rank in stage.ranks))
    if s.plan.strategy not in ("single_node", "layer_wise"):  # asked for: not compared with what was not asked for
        message = f"It stays on one machine: {s.plan.strategy.replace('_', ' ')} on {node} gives {rate:.1f} tokens/s"
        return Reason(case="one_machine_is_best", message=message, numbers=numbers)
    where, over = place(s.cost, s.plan), "" if len(s.plan.stages) == 1 else " over several machines"
    other = s.split or (s.device_split if len(s.plan.stages) == 1 else None)
    if other is None:
        return Reason(
            case="one_machine_is_best",
            message=f"Do not split it{over}: it fits on {where}, {rate:.1f} tokens/s, and nothing else can take a part",
            numbers=numbers,
        )
    parts = other.plan.nodes
    how = f"over {', '.join(parts)}" if len(parts) > 1 else "over its devices"
    numbers |= {
        "split_nodes": list(parts),
        "split_decode_tokens_per_s": other.predicted.decode_tokens_per_s,
        "split_time_to_first_token_s": other.predicted.time_to_first_token_s,
    }
    faster = other.predicted.decode_tokens_per_s > rate
    return Reason(
        case="one_machine_is_best",
        message=f"Do not split it{over}: {where} alone gives {rate:.1f} tokens/s, the best split {how} "
        f"{other.predicted.decode_tokens_per_s:.1f}" + (f"; {_whole(s, s.predicted, other.predicted)}" if faster else ""),
        numbers=numbers,
    )


def one_machine_is_as_good(s: Situation) -> Reason | None:
    """A split would be better by so little that it is not worth the trouble."""
    if not s.feasible or len(s.plan.nodes) == 1 or s.single is None or s.plan.objective_value <= 0:
        return None
    if not _hardly_better(s, s.single) or not s.keeps_limits(s.single):
        return None
    gain, alone = s.single.value / s.plan.objective_value - 1.0, s.single.predicted
    slower = s.predicted.decode_tokens_per_s < alone.decode_tokens_per_s
    why = f"gives slower tokens, {s.predicted.decode_tokens_per_s:.1f}, and is " if slower else "is "
    gain_in_all = min(gain, _total_gain(s, alone)) if slower else gain
    why += f"only {gain_in_all:.1%} better in all" if gain_in_all > 0 else "no better in all"
    return Reason(
        case="one_machine_is_as_good",
        message=f"Do not split it: {place(s.cost, s.single.plan)} alone gives {alone.decode_tokens_per_s:.1f} tokens/s, first "
        f"token after {format_duration(alone.time_to_first_token_s)}; the best split {why} (--best)",
        numbers={
            "node": s.single.plan.nodes[0],
            "gain": gain,
            "total_gain": _total_gain(s, alone),
            "decode_tokens_per_s": alone.decode_tokens_per_s,
            "split_decode_tokens_per_s": s.predicted.decode_tokens_per_s,
            "split_nodes": list(s.plan.nodes),
        }
        | _both(s, s.single),
    )


def _hardly_better(s: Situation, single: Option) -> bool:
    """The objective gains little; or each user's tokens come slower, and the whole does not gain a tenth."""
    if single.value <= (1 + AS_FAST) * s.plan.objective_value:
        return True
    if s.cost.request.objective.kind in ("fit", "bottleneck"):  # asked for by name: neither minds slower tokens
        return False
    slower = s.predicted.decode_tokens_per_s < single.predicted.decode_tokens_per_s
    return slower and _total_gain(s, single.predicted) <= WORTH_SLOWER_TOKENS


def _total_gain(s: Situation, alone: Prediction) -> float:
    """What the plan gains over one machine in what people wait for: a request, or the tokens of all users."""
    if s.cost.request.objective.kind == "latency":
        return alone.request_s / s.predicted.request_s - 1.0 if s.predicted.request_s else 0.0
    return s.predicted.aggregate_tokens_per_s / alone.aggregate_tokens_per_s - 1.0 if alone.aggregate_tokens_per_s else 0.0


def _both(s: Situation, single: Option) -> dict[str, float]:
    """One machine beside the plan, in numbers."""
    alone, plan = single.predicted, s.predicted
    return {
        "single_objective_s": single.value,
        "plan_objective_s": s.plan.objective_value,
        "single_decode_tokens_per_s": alone.decode_tokens_per_s,
        "plan_decode_tokens_per_s": plan.decode_tokens_per_s,
        "single_time_to_first_token_s": alone.time_to_first_token_s,
        "plan_time_to_first_token_s": plan.time_to_first_token_s,
        "single_request_s": alone.request_s,
        "plan_request_s": plan.request_s,
        "single_aggregate_tokens_per_s": alone.aggregate_tokens_per_s,
        "plan_aggregate_tokens_per_s": plan.aggregate_tokens_per_s,
    }


def _whole(s: Situation, mine: Prediction, other: Prediction) -> str:
    """Why `mine` is better although its tokens come slower: its first token, and the whole."""
    first = f"first token after {format_duration(mine.time_to_first_token_s)} instead of "
    first += format_duration(other.time_to_first_token_s)
    if s.cost.request.objective.kind == "latency":
        return f"{first}, the whole request {format_duration(mine.request_s)} instead of {format_duration(other.request_s)}"
    return f"{first}, {mine.aggregate_tokens_per_s:.1f} tokens/s of all users instead of {other.aggregate_tokens_per_s:.1f}"


def slower_tokens(s: Situation) -> str:
    """Why it is split although each user's tokens come slower than on one machine; empty where they do not."""
    if s.single is None or s.single.value <= s.plan.objective_value:
        return ""
    if s.predicted.decode_tokens_per_s >= s.single.predicted.decode_tokens_per_s:
        return ""
    return (
        f"{place(s.cost, s.single.plan)} alone would give faster tokens ({s.single.predicted.decode_tokens_per_s:.1f} a second); "
        f"the split wins by the rest: {_whole(s, s.predicted, s.single.predicted)}"
    )


def copies_are_best(s: Situation) -> Reason | None:
    """Whole copies on several machines: none of them is split over machines."""
    if not s.feasible or s.plan.replicas < 2 or len(s.plan.nodes) == 1:
        return None
    if any(len({stage.node for stage in stages}) > 1 for stages in s.plan.pipelines):
        return None
    return Reason(
        case="copies_are_best",
        message=f"Do not split it: {s.plan.replicas} whole copies ({', '.join(s.plan.nodes[:6])}) give "
        f"{s.predicted.aggregate_tokens_per_s:.1f} tokens/s in all",
        numbers={"nodes": list(s.plan.nodes), "aggregate_tokens_per_s": s.predicted.aggregate_tokens_per_s},
    )


def one_machine_is_slower(s: Situation) -> Reason | None:
    """It fits on one machine, but the split is better: by how much, and in what."""
    if not s.feasible or len(s.plan.nodes) == 1 or s.single is None or s.single.value <= 0:
        return None
    if _hardly_better(s, s.single):
        return None
    alone, plan = s.single.predicted, s.predicted
    return Reason(
        case="one_machine_is_slower",
        message=f"It would fit on {place(s.cost, s.single.plan)} alone: first token after "
        f"{format_duration(alone.time_to_first_token_s)}, then {alone.decode_tokens_per_s:.1f} tokens/s a user, a request in "
        f"{format_duration(alone.request_s)}, {alone.aggregate_tokens_per_s:.1f} tokens/s in all; the plan: "
        f"{format_duration(plan.time_to_first_token_s)}, {plan.decode_tokens_per_s:.1f}, {format_duration(plan.request_s)}, "
        f"{plan.aggregate_tokens_per_s:.1f}",
        numbers={"node": s.single.plan.nodes[0]} | _both(s, s.single),
    )


def stronger_machine(s: Situation) -> Reason | None:
    """Split and still slow: one device as fast as the best one, with enough memory, would do better."""
    if not s.feasible or len(s.plan.stages) == 1 or (s.single is not None and len(s.single.plan.stages) == 1):
        return None
    if s.predicted.decode_tokens_per_s >= SLOW_TOKENS_PER_S:
        return None
    unit = max(s.cost.units, key=lambda u: u.device.memory_bytes_per_s.value)
    alone, needed = _with_memory(s, unit)
    gain = alone / s.predicted.decode_tokens_per_s
    if gain < STRONGER_GAIN:
        return None
    several = len(machines(s.cost)[unit.node.name]) > 1
    whose = f"whose {unit.device_name} had {format_bytes(needed)}" if several else f"with {format_bytes(needed)}"
    return Reason(
        case="stronger_machine",
        message=f"{s.predicted.decode_tokens_per_s:.1f} tokens/s is all {_these(s)} together; one like "
        f"'{unit.node.name}' {whose} (instead of {format_bytes(unit.device.memory_bytes)}) would give {alone:.1f}",
        numbers={
            "decode_tokens_per_s": s.predicted.decode_tokens_per_s,
            "stronger": alone,
            "memory_bytes": needed,
            "node": unit.node.name,
            "device": unit.device_name,
            "has_bytes": unit.device.memory_bytes,
        },
    )


def _these(s: Situation) -> str:
    return "these machines give" if len(s.cost.cluster.nodes) > 1 else "the devices of this machine give"


def _with_memory(s: Situation, unit: Unit) -> tuple[float, int]:
    """(decode rate of that one device if it held everything, the bytes that it would need)."""
    rank = s.cost.whole_rank(unit, 0, s.cost.model.num_layers)
    needed = max(rank.total_bytes, unit.device.memory_bytes)
    node = unit.node
    device = replace(unit.device, name=unit.device_name, memory_bytes=needed)
    grown = replace(node, memory_bytes=max(needed, node.memory_bytes), devices=(device,))
    alone = replace(s.cost.cluster, nodes=(grown,), links=())
    limits = replace(s.cost.request.limits, memory_fraction=1.0, max_stages=1)
    option = best_single_option(CostModel(replace(s.cost.request, cluster=alone, limits=limits), s.cost.costs))
    return (option.predicted.decode_tokens_per_s if option else 0.0), needed


def stronger_beats_weak(s: Situation) -> Reason | None:
    """One strong machine beats two weak ones together."""
    if not s.feasible or s.plan.strategy not in ("single_node", "layer_wise") or len(s.plan.nodes) > 1 or s.split is None:
        return None
    weak = [name for name in s.split.plan.nodes if name != s.plan.nodes[0]]
    if len(weak) < 2 or s.predicted.decode_tokens_per_s < s.split.predicted.decode_tokens_per_s:
        return None
    return Reason(
        case="stronger_beats_weak",
        message=f"{s.plan.nodes[0]} alone beats {' and '.join(weak)} together: {s.predicted.decode_tokens_per_s:.1f} against "
        f"{s.split.predicted.decode_tokens_per_s:.1f} tokens/s",
        numbers={"node": s.plan.nodes[0], "weak": weak, "split_decode_tokens_per_s": s.split.predicted.decode_tokens_per_s},
    )


def paging_is_a_cliff(s: Situation) -> Reason | None:
    """What running it on one machine alone would mean where no machine holds it, not even over all its devices."""
    if s.single is not None or (s.feasible and len(s.plan.nodes) == 1):
        return None
    for name in sorted(s.misses, key=lambda n: s.misses[n]):
        paged = s.paged_on(name)
        if paged is None or not s.misses[name]:
            continue
        disk = sum(stage.weight_bytes for stage in paged.stages if stage.paging)
        return Reason(
            case="paging_is_a_cliff",
            message=f"Running it on {name} alone would read {format_bytes(disk)} of weights from disk for every token: "
            f"{paged.decode_tokens_per_s:.2f} tokens/s",
            numbers={"node": name, "decode_tokens_per_s": paged.decode_tokens_per_s, "disk_bytes": disk},
        )
    return None
