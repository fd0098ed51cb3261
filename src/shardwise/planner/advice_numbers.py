"""What the advice looks at: the chosen plan beside what else could be done, each with its prediction.

In: a cost model, a plan (or the error that there is none), smaller quantizations. Out: a `Situation`; figures are computed
when a case asks for them. Nothing here fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from shardwise.machines.profile import ClusterProfile, LinkProfile, Measurement
from shardwise.model.description import ModelDescription
from shardwise.planner.candidates import Candidate, best_pipeline, useful_units
from shardwise.planner.cost_memory import rank_memory
from shardwise.planner.cost_model import CostModel
from shardwise.planner.cuts import boundaries
from shardwise.planner.machine_plans import machine_candidates, machine_misses, paged_plan
from shardwise.planner.predict import predict_with
from shardwise.planner.rejections import cluster_miss, limit_reasons
from shardwise.planner.search_dp import Budget
from shardwise.planner.types import Plan, Prediction, Speculation
from shardwise.planner.units import Unit
from shardwise.records import replace

_BUDGET_CELLS = 1e7
_MAX_SEARCHES = 12  # for a split over several machines; more is only needed where machines have many devices


@dataclass(frozen=True, slots=True)
class Option:
    """A plan for some model with its prediction."""

    model: ModelDescription
    plan: Plan
    value: float
    predicted: Prediction


@dataclass
class Situation:
    """One question with everything known about it."""

    cost: CostModel
    chosen: Plan | None
    smaller: list[ModelDescription]
    broken: tuple[str, ...] = ()  # the limits that the plan does not keep; then it is the best plan without limits

    @property
    def feasible(self) -> bool:
        return self.chosen is not None

    @property
    def plan(self) -> Plan:
        assert self.chosen is not None
        return self.chosen

    @property
    def predicted(self) -> Prediction:
        assert self.plan.predicted is not None
        return self.plan.predicted

    @cached_property
    def single(self) -> Option | None:
        """The best machine that holds the model alone, over all of its devices."""
        if self.chosen is None:
            return best_single_option(self.cost)
        return best_single_option(self.cost, self.plan.wire_dtype, self.plan.speculation)

    @cached_property
    def split(self) -> Option | None:
        """The best pipeline over two or more machines found."""
        return _over_machines(self._unlimited)

    @cached_property
    def device_split(self) -> Option | None:
        """The best pipeline of two or more stages."""
        return _best_of(self._unlimited, min_stages=2)

    @property
    def _unlimited(self) -> CostModel:
        limits = replace(self.cost.request.limits, max_stages=None)
        return CostModel(replace(self.cost.request, limits=limits), self.cost.costs)

    @cached_property
    def coarser(self) -> Option | None:
        """The best pipeline with fewer stages than the chosen plan."""
        fewer = len(self.plan.stages) - 1
        if fewer < 1 or self.plan.replicas > 1:
            return None
        limits = replace(self.cost.request.limits, max_stages=fewer)
        model = CostModel(replace(self.cost.request, limits=limits), self.cost.costs)
        return _best_of(model, min_stages=1, wire_dtype=self.plan.wire_dtype, draft=self.plan.speculation)

    def keeps_limits(self, option: Option) -> bool:
        """Whether the option may be taken instead of the chosen plan."""
        request = self.cost.request
        return option.plan.strategy in request.strategies and not limit_reasons(request.limits, option.predicted, option.plan)

    @cached_property
    def smaller_single(self) -> Option | None:
        """The largest smaller quantization that one machine holds."""
        return next((option for option in self._smaller_singles()), None)

    def smaller_faster(self, decode_tokens_per_s: float) -> Option | None:
        """The largest smaller quantization with which one machine is at least so fast."""
        return next((o for o in self._smaller_singles() if o.predicted.decode_tokens_per_s >= decode_tokens_per_s), None)

    def _smaller_singles(self) -> Iterator[Option]:
        """Smaller quantizations that one machine holds, largest first."""
        weight = self.cost.model.weight_bytes
        for description in sorted(self.smaller, key=lambda m: -m.weight_bytes):
            if description.weight_bytes < weight:
                option = best_single_option(self.cost_of(description))
                if option is not None:
                    yield option

    @cached_property
    def smaller_split(self) -> Option | None:
        """The largest smaller quantization that fits split, where the model itself fits nowhere."""
        weight = self.cost.model.weight_bytes
        for description in sorted(self.smaller, key=lambda m: -m.weight_bytes):
            if description.weight_bytes < weight:
                option = _best_of(self.cost_of(description), min_stages=2)
                if option is not None:
                    return option
        return None

    @cached_property
    def misses(self) -> dict[str, int]:
        """Bytes that each machine is short of holding the model alone, on all its devices."""
        if self.chosen is None or not self.chosen.rejections:
            return machine_misses(self.cost)
        short = {r.nodes[0]: r.short_by_bytes for r in self.chosen.rejections if r.strategy == "single_node"}
        return {unit.node.name: short.get(unit.node.name, 0) for unit in self.cost.units}

    @cached_property
    def together_short_bytes(self) -> int:
        """Bytes that all machines together are short."""
        return cluster_miss(self.cost)

    @cached_property
    def needed_bytes(self) -> int:
        """What one machine would need."""
        model = self.cost.model
        return rank_memory(model, 0, model.num_layers, self.cost.workload, self.cost.costs).total_bytes

    def cost_of(self, description: ModelDescription) -> CostModel:
        """The same question about another description."""
        return CostModel(replace(self.cost.request, model=description), self.cost.costs)

    def with_links(self, cluster: ClusterProfile) -> Prediction:
        """The chosen plan over other links."""
        return predict_with(CostModel(replace(self.cost.request, cluster=cluster), self.cost.costs), self.plan)

    def paged_on(self, node: str) -> Prediction | None:
        """Everything on one machine that cannot hold it: its devices full, the rest paged."""
        plan = paged_plan(self.cost, node)
        return predict_with(self.cost, plan) if plan is not None else None


def best_single_option(model: CostModel, wire_dtype: str = "f32", draft: Speculation | None = None) -> Option | None:
    """The best machine alone for the request's objective, over all of its devices."""
    found = machine_candidates(model, wire_dtype, draft).values()
    best = min(found, key=lambda c: c.value, default=None)
    return _option(model, best) if best is not None else None


def _best_of(
    model: CostModel,
    min_stages: int,
    *,
    units: list[Unit] | None = None,
    wire_dtype: str = "f32",
    draft: Speculation | None = None,
) -> Option | None:
    if min_stages > min(len(model.units if units is None else units), len(boundaries(model.model)) - 1):
        return None
    plan, searched = best_pipeline(
        model, Budget(_BUDGET_CELLS), units=units, min_stages=min_stages, wire_dtype=wire_dtype, draft=draft
    )
    return _option(model, Candidate(plan, searched.value)) if plan is not None else None


def _over_machines(model: CostModel) -> Option | None:
    """The best pipeline over several machines.

    Where the best one stays on the devices of one machine, every plan over several machines leaves one of these devices out
    or has more stages than the machine has devices: each of these is searched.
    """
    best: Option | None = None
    todo, searches = [(useful_units(model), 2)], 0
    while todo and searches < _MAX_SEARCHES:
        units, min_stages = todo.pop(0)
        searches += 1
        found = _best_of(model, min_stages, units=units)
        if found is None or (best is not None and found.value >= best.value):
            continue
        if len(found.plan.nodes) > 1:
            best = found
            continue
        own = [unit for unit in units if unit.node.name == found.plan.nodes[0]]
        todo += [([unit for unit in units if unit is not left], min_stages) for left in own]
        todo.append((units, max(min_stages, len(own)) + 1))
    return best


def _option(model: CostModel, found: Candidate) -> Option:
    return Option(model.model, found.plan, found.value, predict_with(model, found.plan))


def wired(link: LinkProfile, bytes_per_s: float, latency_s: float) -> LinkProfile:
    """The same path over a cable."""
    return replace(
        link,
        bytes_per_s=Measurement(value=max(bytes_per_s, link.bytes_per_s.value)),
        latency_s=Measurement(value=min(latency_s, link.latency_s.value)),
        jitter_p95_s=None,
        kind="ethernet" if link.kind == "wifi" else link.kind,
    )
