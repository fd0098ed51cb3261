"""The search problem as arrays: what any run of layers costs on any unit, and what any hop costs.

In: a `CostModel`, a `Form`, a wire dtype. Out: a `Problem`; `value_of` tells the exact objective of an arrangement, so
that every search method is judged by the same figure. Nothing here fails.

Shapes: U units, L layers; where a model may not be cut everywhere, L counts the blocks of layers between allowed cuts (`cuts`),
and `layers_of` translates back. A stage [a, b) on unit u costs `base[u] + prefix[u, b] - prefix[u, a]`, `first[u]` more where
a = 0 and `last[u]` more where b = L. Stages may only shrink: a part of a stage that is allowed is allowed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.planner.cost_links import activation_bytes, occupancy_s, token_bytes, transfer_s
from shardwise.planner.cost_memory import HOST_EMBEDDING, layer_kv_bytes, workspace_bytes
from shardwise.planner.cost_model import CostModel
from shardwise.planner.cuts import boundaries
from shardwise.planner.objective import Form
from shardwise.planner.units import Unit

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Stage = tuple[int, int, int]  # (index of the unit, first layer, end layer)


@dataclass(frozen=True, slots=True)
class StageCost:
    """One additive quantity of stages."""

    prefix: Floats  # [U, L + 1]
    base: Floats  # [U]
    first: Floats  # [U]
    last: Floats  # [U]

    def of(self, unit: int, start: int, end: int, num_layers: int) -> float:
        """The quantity of one stage."""
        total = self.base[unit] + self.prefix[unit, end] - self.prefix[unit, start]
        total += self.first[unit] if start == 0 else 0.0
        return float(total + (self.last[unit] if end == num_layers else 0.0))


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything that the search methods look at."""

    form: Form
    units: tuple[Unit, ...]
    num_layers: int
    add: StageCost
    peak: StageCost
    size: StageCost  # bytes
    whole_bytes: Floats  # [U]: one stage with all layers (a tied embedding counts once)
    limit_bytes: Floats  # [U]
    hop_add: Floats  # [U, U]
    hop_peak: Floats  # [U, U]
    back_add: Floats  # [U, U]: from the last stage's unit to the first one's
    min_availability: float = 0.0  # of the machines of an arrangement together
    cuts: tuple[int, ...] = ()  # layer at which each block begins, and the number of layers
    previous: tuple[int, ...] = ()  # see `search_bound.interchangeable`; empty = not looked at yet

    @property
    def num_units(self) -> int:
        return len(self.units)

    def layers_of(self, start: int, end: int) -> tuple[int, int]:
        """The layers of the blocks [start, end)."""
        return self.cuts[start], self.cuts[end]

    def stage_bytes(self, stage: Stage) -> float:
        """Bytes that a stage needs."""
        unit, start, end = stage
        if start == 0 and end == self.num_layers:
            return float(self.whole_bytes[unit])
        return self.size.of(unit, start, end, self.num_layers)

    def availability(self, units: Iterable[int]) -> float:
        """Chance that all machines of these units are up."""
        nodes = {self.units[u].node.name: self.units[u].node.availability for u in units}
        return math.prod(nodes.values())

    def fits(self, stages: tuple[Stage, ...]) -> bool:
        """Whether every stage has the memory it needs, and the machines are up often enough."""
        if self.min_availability > 0 and self.availability(s[0] for s in stages) < self.min_availability:
            return False
        return all(self.stage_bytes(s) <= self.limit_bytes[s[0]] for s in stages)

    def sums(self, stages: tuple[Stage, ...]) -> tuple[float, float]:
        """(A, M) of an arrangement."""
        add = sum(self.add.of(*s, self.num_layers) for s in stages)
        peak = max(self.peak.of(*s, self.num_layers) for s in stages)
        if len(stages) > 1:
            for (u, _, _), (v, _, _) in itertools.pairwise(stages):
                add += float(self.hop_add[u, v])
                peak = max(peak, float(self.hop_peak[u, v]))
            add += float(self.back_add[stages[-1][0], stages[0][0]])
        return add, peak

    def value_of(self, stages: tuple[Stage, ...]) -> float:
        """The objective of an arrangement; infinite where it does not fit or has a wrong number of stages."""
        if not self.form.min_stages <= len(stages) <= self.form.max_stages or not self.fits(stages):
            return math.inf
        return self.form.combine(*self.sums(stages))

    def reach(self, peak_limit: float) -> Reach:
        """Which stages are allowed under a limit on M."""
        return Reach.of(self, peak_limit)


@dataclass(frozen=True, slots=True)
class Reach:
    """For every unit and end layer the first layer that a stage may start with (L + 1 where none)."""

    inner: Ints  # [U, L + 1]: stages with 0 < start and end < L
    first: Bools  # [U, L + 1]: the stage [0, end) is allowed
    last: Ints  # [U]: smallest start > 0 of a stage that ends with the model
    hops: Bools  # [U, U]

    @staticmethod
    def of(problem: Problem, peak_limit: float) -> Reach:
        """Both limits, memory and M, for every stage; prefixes are increasing, so a bisection finds the start."""
        units, layers = problem.num_units, problem.num_layers
        inner = np.zeros((units, layers + 1), dtype=np.int64)
        first = np.zeros((units, layers + 1), dtype=bool)
        last = np.zeros(units, dtype=np.int64)
        slack = 1e-12 * max(1.0, abs(peak_limit)) if math.isfinite(peak_limit) else 0.0
        for cost, limits in ((problem.size, problem.limit_bytes), (problem.peak, np.full(units, peak_limit + slack))):
            for u in range(units):
                room = float(limits[u] - cost.base[u])
                prefix = cost.prefix[u]
                starts = np.searchsorted(prefix, prefix - room, side="left")
                inner[u] = np.maximum(inner[u], np.where(room >= 0, starts, layers + 1))
                fits_first = prefix + cost.first[u] <= room
                first[u] = fits_first if cost is problem.size else first[u] & fits_first
                start = int(np.searchsorted(prefix, prefix[layers] + cost.last[u] - room, side="left"))
                last[u] = max(last[u], start, 1)
        return Reach(inner, first, last, problem.hop_peak <= peak_limit + slack)


def _stage_cost(model: CostModel, form: Form, units: list[Unit], which: str) -> StageCost:
    cuts = np.array(boundaries(model.model))
    out = StageCost(*(np.zeros((len(units), len(cuts))), *(np.zeros(len(units)) for _ in range(3))))
    for term in form.terms:
        factor = getattr(term, which)
        if factor == 0:
            continue
        for index, unit in enumerate(units):
            first, last = model.ends_s(unit, term.shape)
            out.prefix[index] += factor * model.layer_prefix_s(unit, term.shape)[cuts]
            out.base[index] += factor * model.overhead_s(term.shape)
            out.first[index] += factor * (first + term.first_s)
            out.last[index] += factor * last
    if which == "add":
        out.base[:] += form.stage_penalty
    return out


def _size(model: CostModel, units: list[Unit], sessions: int | None) -> StageCost:
    description, workload = model.model, model.workload
    users = workload.num_users if sessions is None else sessions
    layers = description.num_layers
    per_layer = [description.layers[i].weight_bytes + layer_kv_bytes(description, i, workload, users) for i in range(layers)]
    prefix = np.concatenate([[0.0], np.cumsum(per_layer)])[np.array(boundaries(description))]
    base = workspace_bytes(description, workload, model.costs, last=False) + sum(t.num_bytes for t in description.other)
    logits = workspace_bytes(description, workload, model.costs, last=True) - workspace_bytes(
        description, workload, model.costs, last=False
    )
    first = float(sum(t.num_bytes for t in description.embedding))
    last = float(description.head_bytes + logits)
    # Half a byte: bytes are rounded per rank, sums of fractional KV are not.
    return StageCost(
        np.tile(prefix, (len(units), 1)),
        np.full(len(units), float(base) - 0.5),
        np.array([0.0 if unit.device.kind in HOST_EMBEDDING else first for unit in units]),
        np.full(len(units), last),
    )


def _hops(model: CostModel, form: Form, units: list[Unit], wire_dtype: str) -> tuple[Floats, Floats, Floats]:
    count = len(units)
    add, peak, back = (np.zeros((count, count)) for _ in range(3))
    hidden, costs = model.model.hidden_size, model.costs
    known: dict[tuple[str, str], tuple[float, float, float]] = {}
    for i, a in enumerate(units):
        for j, b in enumerate(units):
            pair = (a.node.name, b.node.name)
            if pair not in known:
                link = model.link(*pair)
                sums = [0.0, 0.0, 0.0]
                for term in form.terms:
                    size = activation_bytes(hidden, term.shape.rows, wire_dtype, costs)
                    sums[0] += term.add * transfer_s(link, size, costs)
                    sums[1] += term.peak * occupancy_s(link, size, costs)
                    sums[2] += term.back * transfer_s(link, token_bytes(term.shape.rows, costs), costs)
                known[pair] = (sums[0], sums[1], sums[2])
            add[i, j], peak[i, j], back[i, j] = known[pair]
    return add, peak, back


def build_problem(
    model: CostModel,
    form: Form,
    wire_dtype: str = "f32",
    *,
    units: list[Unit] | None = None,
    sessions: int | None = None,
) -> Problem:
    """Arrays for `units` (default: all of the cluster); `sessions` = KV caches to hold (default: every user's)."""
    chosen = model.units if units is None else units
    last = model.model.num_layers
    hop_add, hop_peak, back_add = _hops(model, form, chosen, wire_dtype)
    whole = [float(model.whole_rank(u, 0, last, sessions=sessions).total_bytes) for u in chosen]
    return Problem(
        form=form,
        units=tuple(chosen),
        num_layers=len(boundaries(model.model)) - 1,
        add=_stage_cost(model, form, chosen, "add"),
        peak=_stage_cost(model, form, chosen, "peak"),
        size=_size(model, chosen, sessions),
        whole_bytes=np.array(whole),
        limit_bytes=np.array([float(model.memory_limit_bytes(u)) for u in chosen]),
        hop_add=hop_add,
        hop_peak=hop_peak,
        back_add=back_add,
        min_availability=model.request.limits.min_availability or 0.0,
        cuts=boundaries(model.model),
    )
