"""The cost model of one request, with its pieces cached: what a unit or a stage needs, in seconds and bytes.

In: a `PlanRequest` and the runtime's fixed costs. Out: seconds of steps and hops, bytes of ranks. Everything that is
computed here comes from the `cost_*` modules. Fails with `UsageError` for a node, device or link that does not exist.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardwise.errors import UsageError
from shardwise.machines.profile import LinkProfile
from shardwise.planner.cost_compute import LayerClasses, StepShape, ends_s, step_overhead_s
from shardwise.planner.cost_links import link_between
from shardwise.planner.cost_memory import paging_s, rank_memory
from shardwise.planner.cost_parallel import expert_parallel_s, tensor_parallel_s
from shardwise.planner.cost_rates import RuntimeCosts
from shardwise.planner.types import PlanRequest, RankAssignment, StageAssignment
from shardwise.planner.units import Unit, cluster_units

DEFAULT_COSTS = RuntimeCosts()


class CostModel:
    """Seconds and bytes for one model, cluster and workload."""

    def __init__(self, request: PlanRequest, costs: RuntimeCosts = DEFAULT_COSTS) -> None:
        self.request = request
        self.model = request.model
        self.cluster = request.cluster
        self.workload = request.workload
        self.costs = costs
        self.units = cluster_units(request.cluster)
        self.classes = LayerClasses.of(request.model)
        self._by_key = {unit.key: unit for unit in self.units}
        self._prefixes: dict[tuple[tuple[str, str], StepShape], npt.NDArray[np.float64]] = {}
        self._ends: dict[tuple[tuple[str, str], StepShape], tuple[float, float]] = {}
        self._links: dict[tuple[str, str], LinkProfile] = {}

    def unit(self, node: str, device: str) -> Unit:
        """The unit of that name."""
        found = self._by_key.get((node, device))
        if found is None:
            known = ", ".join(f"{n}/{d}" for n, d in self._by_key)
            raise UsageError(f"no device '{device}' on a node '{node}'", where="plan", hint=f"known: {known}")
        return found

    def link(self, source: str, target: str) -> LinkProfile:
        """The path between two machines."""
        key = (source, target)
        if key not in self._links:
            self._links[key] = link_between(self.cluster, source, target, self.costs)
        return self._links[key]

    def layer_prefix_s(self, unit: Unit, shape: StepShape) -> npt.NDArray[np.float64]:
        """[num_layers + 1]: seconds of the layers before each layer."""
        key = (unit.key, shape)
        if key not in self._prefixes:
            times = self.classes.times_s(unit.device, shape, self.workload.kv_type)
            self._prefixes[key] = np.concatenate([[0.0], np.cumsum(times)])
        return self._prefixes[key]

    def ends_s(self, unit: Unit, shape: StepShape) -> tuple[float, float]:
        """What only the first and only the last stage does, seconds."""
        key = (unit.key, shape)
        if key not in self._ends:
            self._ends[key] = ends_s(self.model, unit.device, shape, self.costs)
        return self._ends[key]

    def overhead_s(self, shape: StepShape) -> float:
        """What every stage pays for a step."""
        return step_overhead_s(shape, self.costs)

    def unit_stage_s(self, unit: Unit, start: int, end: int, shape: StepShape) -> float:
        """Seconds of one step in a stage on one unit."""
        prefix = self.layer_prefix_s(unit, shape)
        first, last = self.ends_s(unit, shape)
        total = self.overhead_s(shape) + float(prefix[end] - prefix[start])
        return total + (first if start == 0 else 0.0) + (last if end == self.model.num_layers else 0.0)

    def stage_step_s(self, stage: StageAssignment, shape: StepShape) -> tuple[float, float]:
        """(seconds of a step in the stage with syncs and paging, of which syncs between its ranks)."""
        start, end = stage.layers
        units = [self.unit(r.node, r.device) for r in stage.ranks]
        paged = max(self._paging_s(rank, unit) for rank, unit in zip(stage.ranks, units))
        if len(units) == 1:
            return self.unit_stage_s(units[0], start, end, shape) + paged, 0.0
        links = self.ring_links([unit.node.name for unit in units])
        if stage.ranks[0].experts is not None:
            owners = [(u.device, r.experts or (0, 0)) for u, r in zip(units, stage.ranks)]
            compute, sync = expert_parallel_s(self.model, stage.layers, owners, links, shape, self.costs, self.workload.kv_type)
        else:
            shares = [(u.device, r.share) for u, r in zip(units, stage.ranks)]
            compute, sync = tensor_parallel_s(self.model, stage.layers, shares, links, shape, self.costs, self.workload.kv_type)
        first = self.ends_s(units[0], shape)[0] if start == 0 else 0.0
        sampling = shape.sampled_rows * self.costs.sample_row_s if end == self.model.num_layers else 0.0
        return self.overhead_s(shape) + first + sampling + compute + sync + paged, sync

    def ring_links(self, nodes: list[str]) -> list[LinkProfile]:
        """Links of a ring through `nodes`."""
        return [self.link(a, b) for a, b in zip(nodes, [*nodes[1:], nodes[0]])]

    def _paging_s(self, rank: RankAssignment, unit: Unit) -> float:
        return paging_s(rank.weight_bytes, unit.node, unit.device, rank.total_bytes)

    def memory_limit_bytes(self, unit: Unit) -> int:
        """What a rank on this unit may use."""
        return int(unit.device.memory_bytes * self.request.limits.memory_fraction)

    def whole_rank(self, unit: Unit, start: int, end: int, *, sessions: int | None = None) -> RankAssignment:
        """A rank that holds the layers [start, end) alone."""
        kind = unit.device.kind
        memory = rank_memory(self.model, start, end, self.workload, self.costs, sessions=sessions, device_kind=kind)
        return RankAssignment(
            node=unit.node.name,
            device=unit.device_name,
            share=1.0,
            weight_bytes=memory.weight_bytes,
            kv_bytes=memory.kv_bytes,
            workspace_bytes=memory.workspace_bytes,
            memory_limit_bytes=self.memory_limit_bytes(unit),
        )

    def whole_stage(self, unit: Unit, start: int, end: int, *, sessions: int | None = None) -> StageAssignment:
        """A stage with one rank."""
        return StageAssignment(layers=(start, end), ranks=(self.whole_rank(unit, start, end, sessions=sessions),))
