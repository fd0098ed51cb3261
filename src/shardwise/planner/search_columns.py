"""Packing many replicas into a large cluster of few device classes: column generation, then whole numbers.

In: a cost model whose units fall into classes. Out: a plan with many replicas and a proven bound on its throughput. The
model is the flow over interval columns (class, first layer, length) on layer boundaries, in Dantzig and Wolfe's form
(1960): a column is a whole path, that is a pipeline with so many units of each class; the linear master packs columns into
the classes' counts; pricing finds, for every limit on M, the path of intervals with the smallest sum of the classes' dual
prices by dynamic programming over layer boundaries. Limits on M lie on a grid of ratio `GRID`, which the bound allows for.
Whole numbers come from CP-SAT over the columns. Nothing here fails.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from ortools.linear_solver import pywraplp
from ortools.sat.python import cp_model

from shardwise.planner.candidates import Candidate, as_plan, candidate
from shardwise.planner.cost_model import CostModel
from shardwise.planner.objective import Form, form_for
from shardwise.planner.problem import Floats, Ints, Problem, build_problem
from shardwise.planner.search_dp import Budget
from shardwise.planner.units import Unit
from shardwise.records import replace

GRID = 1.03
_MAX_ROUNDS = 60
_SCALE = 10**6


@dataclass(frozen=True, slots=True)
class Column:
    """A pipeline of classes: (class, first layer, end layer) of each stage, and tokens/s at its limit on M."""

    stages: tuple[tuple[int, int, int], ...]
    rate: float

    def uses(self, num_classes: int) -> Floats:
        """[C]: units of each class."""
        out = np.zeros(num_classes)
        for index, _, _ in self.stages:
            out[index] += 1
        return out


@dataclass(frozen=True, slots=True)
class Packing:
    """What came out: columns and how often, the linear bound in tokens/s."""

    columns: tuple[tuple[Column, int], ...]
    rate: float
    bound: float


def unit_classes(units: list[Unit]) -> list[list[Unit]]:
    """Units with the same device and memory, whatever their name."""
    groups: dict[object, list[Unit]] = {}
    for unit in units:
        device = unit.device
        key = (device.kind, device.memory_bytes, device.memory_bytes_per_s.value, device.compute_flops_per_s.value, device.rates)
        groups.setdefault(key, []).append(unit)
    return list(groups.values())


class Pricing:
    """Cheapest path of intervals for given prices, for every limit on M of a grid."""

    def __init__(self, problem: Problem, twin_hop_peak: Floats) -> None:
        """`problem` has one unit per class; `twin_hop_peak` [C, C] is the hop between different units of the classes."""
        self.problem, self.hop_peak = problem, twin_hop_peak
        self.limits = self._grid()
        self.reaches = [problem.reach(limit) for limit in self.limits]

    def _grid(self) -> Floats:
        layers, peak = self.problem.num_layers, self.problem.peak
        whole = [peak.of(u, 0, layers, layers) for u in range(self.problem.num_units)]
        per_layer = np.diff(peak.prefix, axis=1)
        low = float((per_layer.min(axis=1) + peak.base).min())
        steps = max(1, math.ceil(math.log(max(whole) / low) / math.log(GRID))) + 1
        return np.array([low * GRID**step for step in range(steps + 1)])

    def cheapest(self, index: int, prices: Floats) -> tuple[float, tuple[tuple[int, int, int], ...]]:
        """(sum of prices, path) under limit `index`; an infinite sum where there is none."""
        problem, layers = self.problem, self.problem.num_layers
        reach, allowed = self.reaches[index], self.hop_peak <= self.limits[index]
        classes = problem.num_units
        cost = np.full((classes, layers + 1), np.inf)
        source = np.full((classes, layers + 1, 2), -1, dtype=np.int64)
        for c in range(classes):
            cost[c, np.nonzero(reach.first[c, :layers])[0]] = prices[c]
            whole = problem.peak.of(c, 0, layers, layers) <= self.limits[index]
            if whole and problem.whole_bytes[c] <= problem.limit_bytes[c]:
                cost[c, layers] = prices[c]
        cost[:, 0] = np.inf
        for end in range(2, layers + 1):
            for c in range(classes):
                low = int(reach.last[c] if end == layers else max(1, reach.inner[c, end]))
                if low >= end:
                    continue
                part = np.where(allowed[:, c][:, None], cost[:, low:end], np.inf)
                at = int(np.argmin(part))
                value = part.flat[at] + prices[c]
                if value < cost[c, end]:
                    cost[c, end] = value
                    source[c, end] = (at // part.shape[1], low + at % part.shape[1])
        last = int(np.argmin(cost[:, layers]))
        return float(cost[last, layers]), self._path(source, last) if np.isfinite(cost[last, layers]) else ()

    def _path(self, source: Ints, last: int) -> tuple[tuple[int, int, int], ...]:
        stages, end, here = [], self.problem.num_layers, last
        while end > 0:
            before, start = (int(v) for v in source[here, end])
            stages.append((here, max(0, start), end))
            here, end = before, max(0, start)
        return tuple(reversed(stages))

    def columns(self, prices: Floats) -> tuple[list[Column], float]:
        """Columns that may improve, and the largest reduced gain of any (on the grid's upper rates)."""
        found: list[Column] = []
        gain = 0.0
        for index, limit in enumerate(self.limits):
            upper = 1.0 / (self.limits[index - 1] if index else limit)
            if upper <= 1e-15:
                continue
            cost, path = self.cheapest(index, prices)
            if not path:
                continue
            gain = max(gain, upper - cost)
            rate = 1.0 / self._true_peak(path)
            if rate > cost * (1 + 1e-9):
                found.append(Column(path, rate))
        return found, gain

    def _true_peak(self, path: tuple[tuple[int, int, int], ...]) -> float:
        layers = self.problem.num_layers
        stages = max(self.problem.peak.of(c, a, b, layers) for c, a, b in path)
        hops = [float(self.hop_peak[u[0], v[0]]) for u, v in itertools.pairwise(path)]
        return max([stages, *hops])


def _master(columns: list[Column], counts: Floats, most: int) -> tuple[float, Floats, float]:
    """(tokens/s, price of a unit of each class, price of a replica) of the linear packing."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    uses = [column.uses(len(counts)) for column in columns]
    amounts = [solver.NumVar(0.0, solver.infinity(), "") for _ in columns]
    rows = []
    for c, count in enumerate(counts):
        row = solver.Constraint(-solver.infinity(), float(count))
        for amount, use in zip(amounts, uses):
            row.SetCoefficient(amount, float(use[c]))
        rows.append(row)
    replicas = solver.Constraint(-solver.infinity(), float(most))
    objective = solver.Objective()
    for amount, column in zip(amounts, columns):
        replicas.SetCoefficient(amount, 1.0)
        objective.SetCoefficient(amount, column.rate)
    objective.SetMaximization()
    solver.Solve()
    return float(objective.Value()), np.array([row.dual_value() for row in rows]), float(replicas.dual_value())


def _whole_numbers(columns: list[Column], counts: Floats, most: int, time_limit_s: float, seed: int) -> list[tuple[Column, int]]:
    """The best packing in whole numbers of these columns (CP-SAT)."""
    model = cp_model.CpModel()
    uses = [column.uses(len(counts)) for column in columns]
    amounts = [model.new_int_var(0, int(min(c // u for c, u in zip(counts, use) if u)), "") for use in uses]
    for c, count in enumerate(counts):
        model.add(sum(int(use[c]) * amount for use, amount in zip(uses, amounts)) <= int(count))
    model.add(sum(amounts) <= most)
    top = max(column.rate for column in columns)
    model.maximize(sum(round(_SCALE * column.rate / top) * amount for column, amount in zip(columns, amounts)))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return []
    return [(column, solver.value(amount)) for column, amount in zip(columns, amounts) if solver.value(amount)]


def pack(problem: Problem, twin_hop_peak: Floats, counts: Floats, most: int, time_limit_s: float, seed: int) -> Packing:
    """Most tokens/s of at most `most` pipelines; `problem` has one unit a class, `counts` [C] how many there are."""
    pricing = Pricing(problem, twin_hop_peak)
    columns, _ = pricing.columns(np.zeros(len(counts)))
    columns = [c for c in columns if np.all(c.uses(len(counts)) <= counts)]
    bound = math.inf
    if not columns:
        return Packing((), 0.0, bound)
    for _ in range(_MAX_ROUNDS):
        value, prices, replica_price = _master(columns, counts, most)
        fresh, gain = pricing.columns(prices)
        bound = min(bound, value + most * max(0.0, gain - replica_price))
        known = {column.stages for column in columns}
        fresh = [c for c in fresh if c.stages not in known and np.all(c.uses(len(counts)) <= counts)]
        if not fresh:
            break
        columns += fresh
    chosen = _whole_numbers(columns, counts, most, time_limit_s, seed)
    return Packing(tuple(chosen), sum(column.rate * amount for column, amount in chosen), bound)


def _twin_hops(model: CostModel, form: Form, groups: list[list[Unit]], wire_dtype: str) -> Floats:
    """[C, C] occupancy between different units of two classes (of one class: its first two)."""
    pairs = [group[0] for group in groups] + [group[-1] for group in groups]
    peak = build_problem(model, form, wire_dtype, units=pairs).hop_peak
    size = len(groups)
    out: Floats = peak[:size, :size].copy()
    for c in range(size):
        out[c, c] = peak[c, size + c] if len(groups[c]) > 1 else np.inf
    return out


def pack_pipelines(model: CostModel, limit: int, budget: Budget) -> Candidate | None:
    """A plan with up to `limit` replicas; a few numbers of users per replica are tried."""
    groups = unit_classes(model.units)
    counts = np.array([float(len(group)) for group in groups])
    best: Candidate | None = None
    tries = sorted({limit, max(2, limit // 2), max(2, limit // 4), 2})
    for replicas in tries:
        sessions = -(-model.workload.num_users // replicas)
        workload = replace(model.workload, num_users=sessions)
        form = form_for(workload, model.request.objective, max(1, min(sessions, model.model.num_layers)))
        problem = build_problem(model, form, units=[g[0] for g in groups], sessions=sessions)
        seconds = max(1.0, model.request.time_limit_s / (4 * len(tries)))
        packing = pack(problem, _twin_hops(model, form, groups, "f32"), counts, replicas, seconds, model.request.seed)
        found = _placed(model, groups, packing, sessions)
        if found is not None and (best is None or found.value < best.value):
            best = found
    return best


def _placed(model: CostModel, groups: list[list[Unit]], packing: Packing, sessions: int) -> Candidate | None:
    """Give the columns concrete machines."""
    pools = [list(group) for group in groups]
    pipelines = []
    for column, amount in packing.columns:
        for _ in range(amount):
            pipelines.append(tuple(model.whole_stage(pools[c].pop(0), a, b, sessions=sessions) for c, a, b in column.stages))
    if len(pipelines) < 2:
        return None
    bound = 1.0 / packing.bound if packing.bound > 0 else None
    return candidate(model, as_plan(pipelines), bound, f"column generation over {len(groups)} device classes")
