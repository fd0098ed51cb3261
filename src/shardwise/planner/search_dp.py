"""Exact search for the smallest A under a limit on M: dynamic programming over sets of units, pruned by a bound.

In: a `Problem`, a limit on M, a value to beat. Out: the best arrangement of at least two stages, and whether it is proven
the best. State: (set of units, class of the first unit, class of the last unit) -> the smallest A for every number of
layers placed. A class holds units whose links are alike, so a switched home network has one or two. Layers of a stage are
chosen by a sliding-window minimum, because a stage's cost is a difference of prefixes. With more than `max_states` states
in a level only the most promising go on (a beam), and nothing is proven. Never fails.

Shapes: N states, W layer counts kept (from `low` on), U units. Source of the recurrence: Held and Karp 1962 over sets,
EdgeShard (2024) for stages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shardwise.planner.problem import Bools, Floats, Ints, Problem, Reach, Stage
from shardwise.planner.search_bound import RemainingBound, interchangeable, link_classes

MAX_UNITS = 62  # bits of a set


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to."""

    stages: tuple[Stage, ...]  # empty where nothing was found
    add: float
    exact: bool


@dataclass(slots=True)
class Budget:
    """How much a search may still do, in cells of tables that are looked at; deterministic, unlike a clock."""

    cells: float

    @property
    def spent(self) -> bool:
        return self.cells <= 0


MAX_CELLS = 2.5e7  # of a level before pruning, beyond 16 units: 200 MB
CELLS_A_CALL = 2000  # what a step costs beside its cells
CELLS_PER_S = 8e6  # on one core of a shared two-core server


@dataclass(slots=True)
class _Level:
    """All states with the same number of stages, sorted by (set, first, last)."""

    masks: Ints  # [N]
    firsts: Ints  # [N] class of the first unit
    lasts: Ints  # [N] class of the last unit
    best: Floats  # [N, W]
    low: int  # layers placed in the first column

    def rows(self, keep: Ints) -> _Level:
        """Some of the states, without columns that are infinite in all of them."""
        best = self.best[keep]
        used = np.nonzero(np.isfinite(best).any(axis=0))[0]
        first, last = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
        return _Level(self.masks[keep], self.firsts[keep], self.lasts[keep], best[:, first:last], self.low + first)


def window_minimum(rows: Floats, low: Ints, high: Ints) -> Floats:
    """[N, K] minima of `rows` over the columns [low[k], high[k]); infinite where that is empty (a sparse table)."""
    out = np.full((rows.shape[0], len(low)), np.inf)
    length = high - low
    filled = length > 0
    if not filled.any():
        return out
    power = np.zeros(len(low), dtype=np.int64)
    power[filled] = np.floor(np.log2(length[filled])).astype(np.int64)
    table = rows
    for level in range(int(power.max()) + 1):
        span = 1 << level
        at = np.nonzero(filled & (power == level))[0]
        if len(at):
            out[:, at] = np.minimum(table[:, low[at]], table[:, high[at] - span])
        table = np.minimum(table[:, :-span], table[:, span:])
    return out


class SubsetSearch:
    """One search: build, then `run`."""

    def __init__(
        self,
        problem: Problem,
        peak_limit: float,
        *,
        upper: float,
        max_states: int,
        any_will_do: bool = False,
        budget: Budget | None = None,
    ) -> None:
        self.budget = Budget(math.inf) if budget is None else budget
        self.problem, self.upper, self.any_will_do = problem, upper, any_will_do
        widest = problem.num_units * (problem.num_layers + 1)
        self.max_states = min(max_states, max(64, int(MAX_CELLS // widest) if problem.num_units > 16 else max_states))
        self.layers = problem.num_layers
        self.reach: Reach = problem.reach(peak_limit)
        self.bound = RemainingBound.of(problem, self.reach)
        self.previous = interchangeable(problem)
        self.out_class, members = link_classes((problem.hop_add, self.reach.hops.astype(float)))
        self.first_class, starters = link_classes((problem.back_add.T,))
        # [C, U]: what any member of the class sees; the unit's own column is never asked for.
        self.hop_add = _per_class(problem.hop_add, members)
        self.hop_allowed = _per_class(self.reach.hops.astype(float), members) > 0.5
        self.back_add = _per_class(problem.back_add.T, starters).T  # [U, C]
        self.cheapest_rest = self.bound(np.zeros(1, dtype=np.int64), 0, self.layers + 1)[0]
        self.exact = True
        self.levels: list[_Level] = []
        self.best_value, self.best_end = math.inf, (-1, -1, -1)  # level, state, last unit

    def run(self) -> Found:
        """Level by level: s stages, then s + 1."""
        level = self._start()
        most = min(self.problem.form.max_stages, self.problem.num_units, self.layers)
        for stages in range(2, most + 1):
            level = self._prune(level)
            if not len(level.masks):
                break
            self.levels.append(level)
            if self.budget.spent:
                self.exact = False
                break
            level = self._extend(level, closing=stages >= self.problem.form.min_stages)
            if self.any_will_do and math.isfinite(self.best_value):
                break
        if not math.isfinite(self.best_value):
            return Found((), math.inf, self.exact)
        return Found(self._trace(), self.best_value, self.exact)

    def _start(self) -> _Level:
        add = self.problem.add
        keep = [u for u in range(self.problem.num_units) if self.previous[u] < 0]
        best = np.full((len(keep), self.layers + 1), np.inf)
        for row, u in enumerate(keep):
            allowed = self.reach.first[u].copy()
            allowed[0] = allowed[-1] = False
            best[row] = np.where(allowed, add.base[u] + add.first[u] + add.prefix[u], np.inf)
        units = np.array(keep, dtype=np.int64)
        return self._merged(np.int64(1) << units, self.first_class[units], self.out_class[units], best, 0)

    def _merged(self, masks: Ints, firsts: Ints, lasts: Ints, best: Floats, low: int) -> _Level:
        """Sort states and join equal ones."""
        order = np.lexsort((lasts, firsts, masks))
        masks, firsts, lasts, best = masks[order], firsts[order], lasts[order], best[order]
        fresh = np.ones(len(masks), dtype=bool)
        fresh[1:] = (masks[1:] != masks[:-1]) | (firsts[1:] != firsts[:-1]) | (lasts[1:] != lasts[:-1])
        starts = np.nonzero(fresh)[0]
        if len(starts) < len(masks):
            best = np.minimum.reduceat(best, starts, axis=0)
        return _Level(masks[starts], firsts[starts], lasts[starts], best, low)

    def _prune(self, level: _Level) -> _Level:
        """Drop what cannot beat the best known value; keep at most `max_states` states."""
        if not len(level.masks):
            return level
        if len(level.masks) > 4 * self.max_states:
            self.exact = False
            rest = self.cheapest_rest[level.low : level.low + level.best.shape[1]]
            rough = (level.best + rest[None, :]).min(axis=1)
            level = level.rows(np.sort(np.argpartition(rough, 4 * self.max_states)[: 4 * self.max_states]))
        masks, inverse = np.unique(level.masks, return_inverse=True)
        bound = self.bound(masks, level.low, level.low + level.best.shape[1])
        bound[~self._up_often_enough(masks)] = np.inf
        total = level.best + bound[inverse]
        hopeless = total >= min(self.upper, self.best_value)
        level.best[hopeless] = np.inf
        promise = np.where(hopeless, np.inf, total).min(axis=1, initial=np.inf)
        keep = np.nonzero(np.isfinite(promise))[0]
        if len(keep) > self.max_states:
            self.exact = False
            keep = np.sort(keep[np.argpartition(promise[keep], self.max_states)[: self.max_states]])
        return level.rows(keep)

    def _up_often_enough(self, masks: Ints) -> Bools:
        """[N]: whether the machines of each set are all up for the wanted share of the time; more machines never are."""
        if self.problem.min_availability <= 0:
            return np.ones(len(masks), dtype=bool)
        chance = np.ones(len(masks))
        nodes: dict[str, tuple[int, float]] = {}
        for index, unit in enumerate(self.problem.units):
            bits = nodes.get(unit.node.name, (0, 1.0))[0] | (1 << index)
            nodes[unit.node.name] = (bits, unit.node.availability)
        for bits, up in nodes.values():
            chance = np.where((masks & np.int64(bits)) != 0, chance * up, chance)
        enough: Bools = chance >= self.problem.min_availability
        return enough

    def _free(self, level: _Level, v: int) -> Ints:
        """States that `v` may follow."""
        free = ((level.masks >> v) & 1) == 0
        if self.previous[v] >= 0:
            free &= ((level.masks >> self.previous[v]) & 1) == 1
        rows: Ints = np.nonzero(free & self.hop_allowed[level.lasts, v])[0]
        return rows

    def _extend(self, level: _Level, *, closing: bool) -> _Level:
        parts: list[_Level] = []
        for v in range(self.problem.num_units):
            rows = self._free(level, v)
            if not len(rows):
                continue
            self.budget.cells -= len(rows) * level.best.shape[1] + CELLS_A_CALL
            arriving = level.best[rows] + self.hop_add[level.lasts[rows], v][:, None]
            if closing:
                self._close(level, rows, arriving, v)
            parts.append(self._grown(level, rows, arriving, v))
        parts = [part for part in parts if len(part.masks)]
        if not parts:
            none = np.zeros(0, dtype=np.int64)
            return _Level(none, none, none, np.zeros((0, 0)), 0)
        masks = np.concatenate([part.masks for part in parts])
        firsts = np.concatenate([part.firsts for part in parts])
        lasts = np.concatenate([part.lasts for part in parts])
        return self._merged(masks, firsts, lasts, np.concatenate([part.best for part in parts]), parts[0].low)

    def _grown(self, level: _Level, rows: Ints, arriving: Floats, v: int) -> _Level:
        """States with `v` as the new last unit: best over the old last units, then over where the stage starts."""
        masks, firsts = level.masks[rows], level.firsts[rows]
        fresh = np.ones(len(rows), dtype=bool)
        fresh[1:] = (masks[1:] != masks[:-1]) | (firsts[1:] != firsts[:-1])
        starts = np.nonzero(fresh)[0]
        joined = np.minimum.reduceat(arriving, starts, axis=0) if len(starts) < len(rows) else arriving
        prefix, width = self.problem.add.prefix[v], joined.shape[1]
        ends = np.arange(level.low + 1, self.layers)  # an inner stage leaves at least one layer
        low = np.clip(self.reach.inner[v, ends] - level.low, 0, width)
        high = np.minimum(ends - level.low, width)
        best = window_minimum(joined - prefix[None, level.low : level.low + width], low, high)
        best += (prefix[ends] + self.problem.add.base[v])[None, :]
        best[best + self.cheapest_rest[ends][None, :] >= min(self.upper, self.best_value)] = np.inf
        alive = np.isfinite(best).any(axis=1)
        new = masks[starts][alive] | (np.int64(1) << v)
        lasts = np.full(len(new), self.out_class[v], dtype=np.int64)
        return _Level(new, firsts[starts][alive], lasts, best[alive], level.low + 1)

    def _ending(self, v: int, low: int, width: int) -> Floats:
        """[W]: cost of a last stage on `v` that starts at each layer, without the way back."""
        add, layers = self.problem.add, self.layers
        starts = np.arange(low, low + width)
        cost: Floats = add.base[v] + add.last[v] + add.prefix[v, layers] - add.prefix[v, starts]
        return np.where((starts >= self.reach.last[v]) & (starts < layers), cost, np.inf)

    def _close(self, level: _Level, rows: Ints, arriving: Floats, v: int) -> None:
        """Let `v` take all that is left."""
        total = (arriving + self._ending(v, level.low, arriving.shape[1])[None, :]).min(axis=1, initial=np.inf)
        total = total + self.back_add[v, level.firsts[rows]]
        total[~self._up_often_enough(level.masks[rows] | (np.int64(1) << v))] = np.inf
        at = int(np.argmin(total))
        if total[at] < self.best_value and total[at] < self.upper:
            self.best_value = float(total[at])
            self.best_end = (len(self.levels) - 1, int(rows[at]), v)

    def _trace(self) -> tuple[Stage, ...]:
        """Walk back from the best end; every step repeats one minimum."""
        index, row, v = self.best_end
        level = self.levels[index]
        start = level.low + int(np.argmin(level.best[row] + self._ending(v, level.low, level.best.shape[1])))
        stages = [(v, start, self.layers)]
        while index > 0:
            unit, before, begin = self._step_back(self.levels[index], self.levels[index - 1], row, start)
            stages.append((unit, begin, start))
            row, start, index = before, begin, index - 1
        level = self.levels[0]
        first = next(u for u in range(self.problem.num_units) if level.masks[row] == (1 << u) and self.reach.first[u, start])
        stages.append((first, 0, start))
        return tuple(reversed(stages))

    def _step_back(self, level: _Level, before: _Level, row: int, end: int) -> tuple[int, int, int]:
        """(last unit, state before, first layer) of the cheapest way into state `row` with `end` layers placed."""
        best = (math.inf, -1, -1, -1)
        width = before.best.shape[1]
        for v in range(self.problem.num_units):
            inside = (int(level.masks[row]) >> v) & 1 and self.out_class[v] == level.lasts[row]
            if not inside:
                continue
            mask = level.masks[row] & ~(np.int64(1) << v)
            free = self._free(before, v)
            rows = free[(before.masks[free] == mask) & (before.firsts[free] == level.firsts[row])]
            low = min(max(int(self.reach.inner[v, end]) - before.low, 0), width)
            high = min(end - before.low, width)
            if not len(rows) or low >= high:
                continue
            cost = before.best[rows, low:high] + self.hop_add[before.lasts[rows], v][:, None]
            cost = cost - self.problem.add.prefix[v, before.low + low : before.low + high][None, :]
            at, offset = np.unravel_index(int(np.argmin(cost)), cost.shape)
            value = float(cost[at, offset] + self.problem.add.prefix[v, end] + self.problem.add.base[v])
            if value < best[0]:
                best = (value, v, int(rows[at]), before.low + low + int(offset))
        return best[1], best[2], best[3]


def _per_class(matrix: Floats, members: list[list[int]]) -> Floats:
    """[C, U] from [U, U]: the row of a member other than the column's own unit."""
    count = matrix.shape[0]
    out = np.zeros((len(members), count))
    for index, units in enumerate(members):
        for v in range(count):
            other = next((u for u in units if u != v), units[0])
            out[index, v] = matrix[other, v]
    return out


def smallest_add(
    problem: Problem,
    peak_limit: float,
    *,
    upper: float = math.inf,
    max_states: int = 60_000,
    budget: Budget | None = None,
) -> Found:
    """The arrangement of two or more stages with the smallest A < `upper` and M <= `peak_limit`."""
    if problem.num_units < 2 or problem.num_layers < 2:
        return Found((), math.inf, True)
    return SubsetSearch(problem, peak_limit, upper=upper, max_states=max_states, budget=budget).run()
