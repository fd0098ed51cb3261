"""Why a candidate cannot be: too little memory (by how many bytes), or a limit that it breaks.

In: a cost model or a prediction. Out: `Rejection`s, and the `NoFeasiblePlanError` that tells the nearest miss for every
machine and for all of them together.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.errors import NoFeasiblePlanError
from shardwise.planner.cost_memory import rank_memory
from shardwise.planner.cost_model import CostModel
from shardwise.planner.cuts import boundaries
from shardwise.planner.machine_plans import machine_misses, machines, together_short
from shardwise.planner.types import Limits, Plan, Prediction, Rejection
from shardwise.planner.units import Unit
from shardwise.units import format_bytes, format_duration


def limit_reasons(limits: Limits, predicted: Prediction, plan: Plan) -> list[str]:
    """The limits that the plan breaks, in words."""
    out = []
    first, p95 = limits.max_time_to_first_token_s, limits.max_inter_token_p95_s
    if first is not None and predicted.time_to_first_token_s > first:
        out.append(f"first token after {format_duration(predicted.time_to_first_token_s)}, wanted {format_duration(first)}")
    if p95 is not None and predicted.inter_token_s.p95 > p95:
        out.append(f"p95 between tokens {format_duration(predicted.inter_token_s.p95)}, wanted {format_duration(p95)}")
    rate = limits.min_decode_tokens_per_s
    if rate is not None and predicted.decode_tokens_per_s < rate:
        out.append(f"{predicted.decode_tokens_per_s:.2f} tokens/s, wanted {rate:g}")
    if limits.min_availability is not None and predicted.availability < limits.min_availability:
        out.append(f"all machines up {predicted.availability:.1%} of the time, wanted {limits.min_availability:.1%}")
    if limits.max_stages is not None and len(plan.stages) > limits.max_stages:
        out.append(f"{len(plan.stages)} stages, at most {limits.max_stages}")
    return out


def cluster_miss(model: CostModel) -> int:
    """Bytes that all machines together are short."""
    if len(machines(model)) == 1:
        return next(iter(machine_misses(model).values()))
    return together_short(model, model.units)


def misses_in_words(misses: Mapping[str, int], most: int = 12) -> str:
    """`nas 27.9 GiB, laptop 31.2 GiB`: what each machine is short of, the nearest first."""
    nearest = sorted(misses.items(), key=lambda item: item[1])
    rest = f" and {len(nearest) - most} more machines (--json has all)" if len(nearest) > most else ""
    return ", ".join(f"{name} {format_bytes(short)}" for name, short in nearest[:most]) + rest


def rejections(model: CostModel) -> tuple[Rejection, ...]:
    """Machines that cannot hold the model alone, and by how much; and where the model cannot be cut."""
    units = machines(model)
    alone = tuple(
        Rejection(
            strategy="single_node",
            nodes=(name,),
            reason=f"does not fit alone{_on_devices(units[name])}: {format_bytes(short)} short",
            short_by_bytes=short,
        )
        for name, short in machine_misses(model).items()
        if short > 0
    )
    return (*alone, *_uncut(model))


def _on_devices(units: list[Unit]) -> str:
    """All devices of a machine are meant, where it has several."""
    return f", with {' and '.join(unit.device_name for unit in units)} together" if len(units) > 1 else ""


def _uncut(model: CostModel) -> tuple[Rejection, ...]:
    """A model that cannot be split at all."""
    if len(boundaries(model.model)) > 2 or model.model.num_layers == 1:
        return ()
    names = tuple(node.name for node in model.cluster.nodes)
    reason = f"a {model.model.architecture} model of {model.model.num_layers} layers cannot be cut anywhere"
    return (Rejection(strategy="layer_wise", nodes=names, reason=reason),)


def infeasible(model: CostModel) -> NoFeasiblePlanError:
    """Nothing fits: the nearest miss of each machine, and of all together."""
    misses = machine_misses(model)
    nearest = min(misses, key=lambda name: misses[name])
    together = cluster_miss(model)
    whole = rank_memory(model.model, 0, model.model.num_layers, model.workload, model.costs)
    rows = [*rejections(model)]
    names = tuple(node.name for node in model.cluster.nodes)
    reason = (
        f"all machines together are {format_bytes(together)} short"
        if together
        else "the model cannot be cut"
        if len(boundaries(model.model)) == 2
        else "the layers do not divide over the machines' memory within the limits"
    )
    rows.append(Rejection(strategy="layer_wise", nodes=names, reason=reason, short_by_bytes=together))
    return NoFeasiblePlanError(
        f"'{model.model.name}' needs {format_bytes(whole.total_bytes)} and fits nowhere; alone each machine is short by: "
        f"{misses_in_words(misses)}; {reason}",
        where="cluster",
        hint="add memory or a machine, take a smaller quantization, fewer users or a shorter context",
        needed_bytes=whole.total_bytes,
        nearest_miss={"node": nearest, "short_by_bytes": misses[nearest]},
        short_by_bytes_per_node=misses,
        rejections=[
            {"strategy": r.strategy, "nodes": list(r.nodes), "reason": r.reason, "short_by_bytes": r.short_by_bytes} for r in rows
        ],
    )
