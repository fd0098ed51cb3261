"""One machine alone: all of its devices count, not only the strongest one.

In: a cost model. Out: the best plan of every machine that holds the model by itself (on one device, or as a pipeline over
several of its own), the bytes that the others are short of that, and what paging would make of them. Nothing here fails.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from shardwise.planner.candidates import Candidate, best_pipeline, candidate
from shardwise.planner.cost_memory import layer_kv_bytes, rank_memory
from shardwise.planner.cost_model import CostModel
from shardwise.planner.cuts import boundaries
from shardwise.planner.search_dp import MAX_UNITS, Budget
from shardwise.planner.types import Limits, Plan, Speculation
from shardwise.planner.units import Unit
from shardwise.records import replace

_BUDGET_CELLS = 1e7
_MISS_STEP_BYTES = 64 * 2**20  # what is missing is told as exactly as this, or as a 64th of it


def machines(model: CostModel) -> dict[str, list[Unit]]:
    """The units of every machine, in the order of the file."""
    out: dict[str, list[Unit]] = {}
    for unit in model.units:
        out.setdefault(unit.node.name, []).append(unit)
    return out


def machine_candidates(model: CostModel, wire_dtype: str = "f32", draft: Speculation | None = None) -> dict[str, Candidate]:
    """The best plan of every machine that holds the model alone, over any of its devices."""
    out: dict[str, Candidate] = {}
    for name, units in machines(model).items():
        stages = [model.whole_stage(u, 0, model.model.num_layers) for u in units]
        plans = [Plan(strategy="single_node", stages=(s,), wire_dtype=wire_dtype, speculation=draft) for s in stages]
        found = [c for c in (candidate(model, plan, method="enumeration") for plan in plans) if c is not None]
        over_devices = _over_devices(model, units, wire_dtype, draft)
        found += [over_devices] if over_devices is not None else []
        if found:
            out[name] = min(found, key=lambda c: c.value)
    return out


def _over_devices(model: CostModel, units: list[Unit], wire_dtype: str, draft: Speculation | None) -> Candidate | None:
    """The best pipeline of two or more stages over the devices of one machine."""
    if len(units) < 2 or not _may_split(model):
        return None
    pool = units[:MAX_UNITS]
    plan, found = best_pipeline(model, Budget(_BUDGET_CELLS), units=pool, wire_dtype=wire_dtype, draft=draft, min_stages=2)
    return Candidate(plan, found.value, method=f"{found.method}, devices of one machine") if plan is not None else None


def _may_split(model: CostModel) -> bool:
    stages = model.request.limits.max_stages
    return "layer_wise" in model.request.strategies and (stages is None or stages > 1)


def place(model: CostModel, plan: Plan) -> str:
    """Where a plan on one machine runs: `desktop`, `desktop's cuda`, `desktop (cuda + cpu)`; else the machines' names."""
    if len(plan.nodes) > 1:
        return " and ".join(plan.nodes)
    name = plan.nodes[0]
    if len(machines(model)[name]) == 1:
        return name
    devices = list(dict.fromkeys(rank.device for stages in plan.pipelines for stage in stages for rank in stage.ranks))
    return f"{name}'s {devices[0]}" if len(devices) == 1 else f"{name} ({' + '.join(devices)})"


def together_short(model: CostModel, units: list[Unit]) -> int:
    """Bytes of layers that find no place when every unit is filled: 0 where all layers do (ends not counted twice)."""
    description, workload = model.model, model.workload
    sizes = [
        description.layers[i].weight_bytes + layer_kv_bytes(description, i, workload, workload.num_users)
        for i in range(description.num_layers)
    ]
    ends = rank_memory(description, 0, description.num_layers, workload, model.costs)
    extra = ends.weight_bytes + ends.kv_bytes - sum(sizes)
    room = sum(max(0, model.memory_limit_bytes(u) - ends.workspace_bytes) for u in units)
    return max(0, round(sum(sizes) + extra - room))


def machine_misses(model: CostModel) -> dict[str, int]:
    """For every machine the bytes that it is short of holding everything on its devices together; 0 where it fits."""
    limits = model.request.limits
    memory_only = Limits(memory_fraction=limits.memory_fraction, max_stages=limits.max_stages)
    bare = CostModel(replace(model.request, limits=memory_only), model.costs)
    return {name: _miss(bare, units) for name, units in machines(bare).items()}


def _miss(model: CostModel, units: list[Unit]) -> int:
    """With so many bytes more on its largest device (or on the device that comes nearest alone) it would fit."""
    ranks = [model.whole_rank(unit, 0, model.model.num_layers) for unit in units]
    alone = max(0, min(rank.total_bytes - rank.memory_limit_bytes for rank in ranks))
    if alone == 0 or len(units) < 2 or not _may_split(model) or len(boundaries(model.model)) == 2:
        return alone
    if _fits_with(model, units, 0):
        return 0
    cuts = boundaries(model.model)
    block = max(_block_bytes(model, start, end) for start, end in itertools.pairwise(cuts))
    low, high = 0, max(_MISS_STEP_BYTES, together_short(model, units))
    while high < alone and not _fits_with(model, units, high):
        low, high = high, high + block
    high = min(high, alone)
    while high - low > max(_MISS_STEP_BYTES, high // 64):  # `low` does not fit, `high` does
        middle = (low + high) // 2
        low, high = (low, middle) if _fits_with(model, units, middle) else (middle, high)
    return high


def _fits_with(model: CostModel, units: list[Unit], more_bytes: int) -> bool:
    """Whether it fits over the devices of one machine with so many bytes more that may be used on the largest of them."""
    largest = max(units, key=lambda unit: unit.device.memory_bytes)
    memory = largest.device.memory_bytes + math.ceil(more_bytes / model.request.limits.memory_fraction)
    grown = dataclasses.replace(largest, device=replace(largest.device, memory_bytes=memory))
    return _over_devices(model, [grown if unit is largest else unit for unit in units], "f32", None) is not None


def _block_bytes(model: CostModel, start: int, end: int) -> int:
    description, users = model.model, model.workload.num_users
    kv = sum(layer_kv_bytes(description, index, model.workload, users) for index in range(start, end))
    return sum(layer.weight_bytes for layer in description.layers[start:end]) + round(kv)


def paged_plan(model: CostModel, node_name: str) -> Plan | None:
    """Everything on one machine that cannot hold it: accelerators are filled, the processor pages the rest from disk.

    None for a machine whose processor is no unit of its own (Metal shares its memory).
    """
    units = machines(model)[node_name]
    processor = next((unit for unit in units if unit.device.kind == "cpu"), None)
    if processor is None:
        return None
    cuts, first, stages = boundaries(model.model), 0, []
    for unit in (u for u in units if u.device.kind != "cpu") if _may_split(model) else ():
        fitting = [cut for cut in cuts if first < cut < model.model.num_layers and _fits(model, unit, first, cut)]
        if fitting:
            stages.append(model.whole_stage(unit, first, fitting[-1]))
            first = fitting[-1]
    stages.append(model.whole_stage(processor, first, model.model.num_layers))
    return Plan(strategy="single_node" if len(stages) == 1 else "layer_wise", stages=tuple(stages))


def _fits(model: CostModel, unit: Unit, start: int, end: int) -> bool:
    rank = model.whole_rank(unit, start, end)
    return rank.total_bytes <= rank.memory_limit_bytes
