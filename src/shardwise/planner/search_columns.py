"""Packing many replicas into a large cluster of few device classes: column generation, then whole numbers.

In: a cost model whose units fall into classes. Out: a plan with many replicas and a proven bound on its throughput. The
model is the flow over interval columns (class, first layer, length) on layer boundaries, in Dantzig and Wolfe's form
(1960): a column is a whole path, that is a pipeline with so many units of each class; the linear master packs columns into
the classes' counts; pricing finds, for every limit on M, the path of intervals with the smallest sum of the classes' dual
prices by dynamic programming over layer boundaries. Limits on M lie on a grid of ratio `GRID`, which the bound allows for;
the bound holds for the given number of sessions in each replica and at most as many stages as sessions.
Whole numbers come from CP-SAT over the columns. Nothing here fails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shardwise.planner.candidates import Candidate, as_plan, candidate
from shardwise.planner.cost_model import CostModel
from shardwise.planner.cuts import boundaries
from shardwise.planner.objective import form_for
from shardwise.planner.problem import Floats, Ints, Problem, build_problem
from shardwise.planner.units import Unit
from shardwise.records import replace

GRID = 1.03
_MAX_ROUNDS = 60
_MAX_STAGES = 24
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
    """Cheapest path of at most S intervals for given prices, for every limit on M of a grid.

    Hops are left out of the path (they only make it dearer, so the bound stays true) and counted in its rate. The
    cheapest way to place k layers never gets cheaper with k, because a last stage may shrink or go: so the best stage
    before a boundary is the longest one, and all limits are priced at once.
    """

    def __init__(self, problem: Problem, num_classes: int, stages: int) -> None:
        """`problem` has one unit of every class, then a second one of every class."""
        self.problem, self.num_classes, self.stages = problem, num_classes, stages
        self.limits = self._grid()
        layers = problem.num_layers
        self.starts = np.empty((len(self.limits), num_classes, layers + 1), dtype=np.int64)
        self.first = np.zeros((len(self.limits), num_classes, layers + 1), dtype=bool)
        for index, limit in enumerate(self.limits):
            reach = problem.reach(float(limit))
            self.starts[index] = reach.inner[:num_classes]
            self.starts[index, :, layers] = reach.last[:num_classes]
            self.first[index, :, :layers] = reach.first[:num_classes, :layers]
            for c in range(num_classes):
                fits = problem.whole_bytes[c] <= problem.limit_bytes[c]
                self.first[index, c, layers] = fits and problem.peak.of(c, 0, layers, layers) <= limit
        self.first[:, :, 0] = False

    def _grid(self) -> Floats:
        layers, peak = self.problem.num_layers, self.problem.peak
        classes = range(self.num_classes)
        whole = max(peak.of(c, 0, layers, layers) for c in classes)
        fastest = min(float(peak.prefix[c, -1]) for c in classes) / max(1, self.stages)
        steps = max(1, math.ceil(math.log(max(2.0, whole / fastest)) / math.log(GRID))) + 1
        return np.array([fastest * GRID**step for step in range(steps + 1)])

    def cheapest(self, prices: Floats) -> tuple[Floats, Ints, Ints]:
        """(price of all layers [S, limits], class and start of the last stage [S, limits, L + 1])."""
        layers, limits = self.problem.num_layers, len(self.limits)
        rows = np.arange(limits)[:, None]
        best = np.full((self.stages, limits, layers + 1), np.inf)
        classes = np.full((self.stages, limits, layers + 1), -1, dtype=np.int64)
        starts = np.zeros((self.stages, limits, layers + 1), dtype=np.int64)
        opening = np.where(self.first, prices[None, :, None], np.inf)
        best[0], classes[0] = opening.min(axis=1), opening.argmin(axis=1)
        for stage in range(1, self.stages):
            for end in range(2, layers + 1):
                low = np.maximum(self.starts[:, :, end], 1)
                before = np.where(low < end, best[stage - 1][rows, np.minimum(low, layers)], np.inf)
                option = before + prices[None, :]
                chosen = option.argmin(axis=1)
                best[stage, :, end] = option[rows[:, 0], chosen]
                classes[stage, :, end], starts[stage, :, end] = chosen, low[rows[:, 0], chosen]
        return best[:, :, layers], classes, starts

    def columns(self, prices: Floats, replica_price: float) -> tuple[list[Column], float]:
        """Columns that may improve the packing, and a bound on what any column gains."""
        totals, classes, starts = self.cheapest(prices)
        uppers = 1.0 / np.concatenate([self.limits[:1], self.limits[:-1]])
        gain = float(np.max(uppers[None, :] - totals, initial=-math.inf))
        found: list[Column] = []
        for index in range(len(self.limits)):
            stage = int(np.argmin(totals[:, index]))
            if uppers[index] - totals[stage, index] <= replica_price:
                continue
            path, end = [], self.problem.num_layers
            for at in range(stage, -1, -1):
                start = int(starts[at, index, end]) if at else 0
                path.append((int(classes[at, index, end]), start, end))
                end = start
            column = self.column(tuple(reversed(path)))
            if column.rate - totals[stage, index] > replica_price * (1 + 1e-9):
                found.append(column)
        return found, gain

    def column(self, path: tuple[tuple[int, int, int], ...]) -> Column:
        """With the rate that the objective gives it; units of a class take turns, so that hops are between two machines."""
        used: dict[int, int] = {}
        stages = []
        for c, start, end in path:
            used[c] = used.get(c, -1) + 1
            stages.append((c + self.num_classes * (used[c] % 2), start, end))
        add, peak = self.problem.sums(tuple(stages))
        return Column(path, 1.0 / self.problem.form.combine(add, peak))


def _master(columns: list[Column], counts: Floats, most: int) -> tuple[float, Floats, float]:
    """(tokens/s, price of a unit of each class, price of a replica) of the linear packing."""
    from ortools.linear_solver import pywraplp  # heavy: only plans with replicas need it

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
    from ortools.sat.python import cp_model

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


def pack(pricings: list[Pricing], counts: Floats, most: int, time_limit_s: float, seed: int) -> Packing:
    """Most tokens/s of at most `most` pipelines; one `Pricing` for every number of stages, `counts` [C] units."""

    def price(prices: Floats, replica_price: float) -> tuple[list[Column], float]:
        found = [pricing.columns(prices, replica_price) for pricing in pricings]
        usable = [c for columns, _ in found for c in columns if np.all(c.uses(len(counts)) <= counts)]
        return usable, max(gain for _, gain in found)

    columns, _ = price(np.zeros(len(counts)), 0.0)
    bound = math.inf
    if not columns:
        return Packing((), 0.0, bound)
    for _ in range(_MAX_ROUNDS):
        value, prices, replica_price = _master(columns, counts, most)
        fresh, gain = price(prices, replica_price)
        bound = min(bound, value + most * max(0.0, gain - replica_price))
        known = {column.stages for column in columns}
        fresh = [c for c in fresh if c.stages not in known]
        if not fresh:
            break
        columns += list({c.stages: c for c in fresh}.values())
    chosen = _whole_numbers(columns, counts, most, time_limit_s, seed)
    return Packing(tuple(chosen), sum(column.rate * amount for column, amount in chosen), bound)


def pack_pipelines(model: CostModel, limit: int) -> Candidate | None:
    """A plan with up to `limit` replicas; a few numbers of users per replica are tried."""
    groups = unit_classes(model.units)
    counts = np.array([float(len(group)) for group in groups])
    best: Candidate | None = None
    tries = sorted({limit, max(2, limit // 2), max(2, limit // 4), max(2, limit // 8), 2})
    for replicas in tries:
        sessions = -(-model.workload.num_users // replicas)
        workload = replace(model.workload, num_users=sessions)
        pairs = [group[0] for group in groups] + [group[-1] for group in groups]
        most_stages = min(sessions, len(boundaries(model.model)) - 1, _MAX_STAGES)
        pricings = []
        for stages in sorted({1, *range(2, most_stages + 1, max(1, most_stages // 6)), most_stages}):
            form = form_for(workload, model.request.objective, stages)
            problem = build_problem(model, form, units=pairs, sessions=sessions)
            pricings.append(Pricing(problem, len(groups), stages))
        seconds = max(1.0, model.request.time_limit_s / (8 * len(tries)))
        packing = pack(pricings, counts, replicas, seconds, model.request.seed)
        found = _placed(model, groups, packing, sessions)
        if found is not None and (best is None or found.value < best.value):
            best = found
    return best


def _placed(model: CostModel, groups: list[list[Unit]], packing: Packing, sessions: int) -> Candidate | None:
    """Give the columns concrete machines."""
    pools = [list(group) for group in groups]
    cuts = boundaries(model.model)
    pipelines = []
    for column, amount in packing.columns:
        for _ in range(amount):
            placed = [(pools[c].pop(0), cuts[a], cuts[b]) for c, a, b in column.stages]
            pipelines.append(tuple(model.whole_stage(*stage, sessions=sessions) for stage in placed))
    if len(pipelines) < 2:
        return None
    bound = 1.0 / packing.bound if packing.bound > 0 else None
    method = f"column generation over {len(groups)} device classes, {sessions} sessions a replica"
    return candidate(model, as_plan(pipelines), bound, method)
