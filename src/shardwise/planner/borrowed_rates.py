"""Rates that a prediction takes from another quantization, because its own was not measured on that device.

In: a cost model and a plan. Out: `BorrowedRate`s. A probe with `--quick` measures one quantization only; rates of others
can differ several times. Hand-written figures are the reader's own and not told here. Nothing fails.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shardwise.model.description import WeightTensor
from shardwise.planner.cost_compute import layer_measured
from shardwise.planner.cost_model import CostModel
from shardwise.planner.cost_rates import measured_quantizations, timed_head
from shardwise.planner.types import Plan
from shardwise.planner.units import Unit

_TIMED = ""  # no quantization
_WORTH_TELLING = 0.05  # of the bytes that a stage reads: norms and scales do not matter


@dataclass(frozen=True, slots=True)
class BorrowedRate:
    """One quantization on one device, and what was measured instead."""

    node: str
    device: str
    where: str  # the machine, with the device where it has several
    quantization: str
    taken: tuple[str, ...]


def borrowed_rates(model: CostModel, plan: Plan) -> tuple[BorrowedRate, ...]:
    """Each (device, quantization) of the plan whose rate was measured with other quantizations only; in order of use."""
    found: dict[tuple[str, str, str], BorrowedRate] = {}
    for stage in (stage for stages in (*plan.pipelines, plan.prefill_stages) for stage in stages):
        for rank in stage.ranks:
            unit = model.unit(rank.node, rank.device)
            known = measured_quantizations(unit.device)
            sizes = _sizes(model, unit, stage.layers)
            for quantization, size in sizes.items():
                if known and quantization not in (_TIMED, *known) and size >= _WORTH_TELLING * sizes.total():
                    several = sum(1 for u in model.units if u.node.name == rank.node) > 1
                    where = f"{rank.node}'s {rank.device}" if several else rank.node
                    key = (rank.node, rank.device, quantization)
                    found.setdefault(key, BorrowedRate(*key[:2], where, quantization, known))
    return tuple(found.values())


def _sizes(model: CostModel, unit: Unit, layers: tuple[int, int]) -> Counter[str]:
    """Bytes by quantization of what the stage reads with a rate; what was timed itself counts under no name."""
    sizes: Counter[str] = Counter()
    for layer in model.model.layers[layers[0] : layers[1]]:
        _add(sizes, layer.tensors, timed=layer_measured(layer, unit.device))
    if layers[1] == model.model.num_layers:
        output = model.model.output
        head = output if any(len(t.shape) > 1 for t in output) else (*output, *model.model.embedding)
        _add(sizes, head, timed=timed_head(unit.device) is not None)
    return sizes


def _add(sizes: Counter[str], tensors: tuple[WeightTensor, ...], *, timed: bool) -> None:
    for tensor in tensors:
        sizes[_TIMED if timed else tensor.quantization] += tensor.num_bytes
