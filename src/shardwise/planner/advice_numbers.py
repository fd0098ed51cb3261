"""What the advice looks at: the chosen plan beside what else could be done, each with its prediction.

In: a cost model, a plan (or the error that there is none), smaller quantizations. Out: a `Situation`; figures are computed
when a case asks for them. Nothing here fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwise.machines.profile import ClusterProfile, LinkProfile, Measurement
from shardwise.model.description import ModelDescription
from shardwise.planner.candidates import Candidate, best_pipeline, candidate
from shardwise.planner.cost_memory import rank_memory
from shardwise.planner.cost_model import CostModel
from shardwise.planner.predict import predict_with
from shardwise.planner.rejections import cluster_miss, single_misses
from shardwise.planner.search_dp import Budget
from shardwise.planner.types import Plan, Prediction
from shardwise.planner.units import Unit
from shardwise.records import replace

_BUDGET_CELLS = 1e7


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
        """The best machine that holds the model alone."""
        return best_single_option(self.cost)

    @cached_property
    def split(self) -> Option | None:
        """The best pipeline of two or more stages, where the chosen plan is none."""
        limits = replace(self.cost.request.limits, max_stages=None)
        model = CostModel(replace(self.cost.request, limits=limits), self.cost.costs)
        return _best_of(model, min_stages=2)

    @cached_property
    def coarser(self) -> Option | None:
        """The best pipeline with fewer stages than the chosen plan."""
        fewer = len(self.plan.stages) - 1
        if fewer < 1 or self.plan.replicas > 1:
            return None
        limits = replace(self.cost.request.limits, max_stages=fewer)
        return _best_of(CostModel(replace(self.cost.request, limits=limits), self.cost.costs), min_stages=1)

    @cached_property
    def smaller_single(self) -> Option | None:
        """The largest smaller quantization that one machine holds."""
        weight = self.cost.model.weight_bytes
        for description in sorted(self.smaller, key=lambda m: -m.weight_bytes):
            if description.weight_bytes < weight:
                option = best_single_option(self.cost_of(description))
                if option is not None:
                    return option
        return None

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
        """Bytes that each machine is short of holding the model alone."""
        return single_misses(self.cost)

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

    def whole_on(self, unit: Unit) -> Prediction:
        """Everything on one unit, whether it fits or not (paging where it does not)."""
        stage = self.cost.whole_stage(unit, 0, self.cost.model.num_layers)
        return predict_with(self.cost, Plan(strategy="single_node", stages=(stage,)))


def best_single_option(model: CostModel) -> Option | None:
    """The best machine alone for the request's objective."""
    last = model.model.num_layers
    plans = [Plan(strategy="single_node", stages=(model.whole_stage(u, 0, last),)) for u in model.units]
    found = [c for c in (candidate(model, plan) for plan in plans) if c is not None]
    best = min(found, key=lambda c: c.value, default=None)
    return _option(model, best) if best is not None else None


def _best_of(model: CostModel, min_stages: int) -> Option | None:
    plan, searched = best_pipeline(model, Budget(_BUDGET_CELLS), min_stages=min_stages)
    return _option(model, Candidate(plan, searched.value)) if plan is not None else None


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
