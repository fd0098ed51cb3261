"""Exact search for the smallest A under a limit on M: dynamic programming over sets of units, pruned by a bound.

In: a `Problem`, a limit on M, a value to beat. Out: the best arrangement of at least two stages, and whether it is proven
the best. State: (set of units, first unit where it matters, last unit) -> the smallest A for every number of layers
placed. Layers of a stage are chosen by a sliding-window minimum, because a stage's cost is a difference of prefixes.
With more than `max_states` states in a level only the most promising go on (a beam), and nothing is proven. Never fails.

Shapes: N states, L layers, U units. Source of the recurrence: Held and Karp 1962 over sets, EdgeShard (2024) for stages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shardwise.planner.problem import Floats, Ints, Problem, Reach, Stage
from shardwise.planner.search_bound import RemainingBound, interchangeable

MAX_UNITS = 62  # bits of a set


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to."""

    stages: tuple[Stage, ...]  # empty where nothing was found
    add: float
    exact: bool
    bound: float = 0.0  # no arrangement has a smaller A (only where exact or computed)


@dataclass(slots=True)
class _Level:
    """All states with the same number of stages, sorted by (set, first)."""

    masks: Ints  # [N]
    firsts: Ints  # [N]; 0 where the first unit does not matter
    lasts: Ints  # [N]
    best: Floats  # [N, L + 1]


class _WindowMinimum:
    """min of rows over [low[k], k) for every k, by doubling (a sparse table), O(L log L) a row."""

    def __init__(self, low: Ints, layers: int) -> None:
        ends = np.arange(layers + 1)
        self.low = np.minimum(low, ends)
        length = ends - self.low
        self.power = np.zeros(layers + 1, dtype=np.int64)
        positive = length > 0
        self.power[positive] = np.floor(np.log2(length[positive])).astype(np.int64)
        self.positive = positive
        self.levels = int(self.power.max(initial=0)) + 1

    def __call__(self, rows: Floats) -> Floats:
        out = np.full_like(rows, np.inf)
        table = rows
        for level in range(self.levels):
            at = np.nonzero(self.positive & (self.power == level))[0]
            if len(at):
                span = 1 << level
                out[:, at] = np.minimum(table[:, self.low[at]], table[:, at - span])
            if level + 1 < self.levels:
                span = 1 << level
                longer = np.full_like(table, np.inf)
                longer[:, : table.shape[1] - span] = np.minimum(table[:, :-span], table[:, span:])
                table = longer
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
        with_first: bool,
        any_will_do: bool = False,
    ) -> None:
        self.problem, self.upper, self.max_states, self.any_will_do = problem, upper, max_states, any_will_do
        self.reach: Reach = problem.reach(peak_limit)
        self.bound = RemainingBound.of(problem, self.reach)
        self.previous = interchangeable(problem)
        self.with_first = with_first
        self.cheapest_back = problem.back_add.copy()
        np.fill_diagonal(self.cheapest_back, np.inf)
        self.cheapest_back = self.cheapest_back.min(axis=1)
        self.windows = [_WindowMinimum(self.reach.inner[u], problem.num_layers) for u in range(problem.num_units)]
        self.exact = True
        self.levels: list[_Level] = []
        self.best_value, self.best_end = math.inf, (-1, -1, -1)  # level, state, last unit

    def run(self) -> Found:
        """Level by level: s stages, then s + 1."""
        level = self._start()
        most = min(self.problem.form.max_stages, self.problem.num_units, self.problem.num_layers)
        for stages in range(2, most + 1):
            level = self._prune(level)
            if not len(level.masks):
                break
            self.levels.append(level)
            level = self._extend(level, closing=stages >= self.problem.form.min_stages)
            if self.any_will_do and math.isfinite(self.best_value):
                break
        if not math.isfinite(self.best_value):
            return Found((), math.inf, self.exact)
        return Found(self._trace(), self.best_value, self.exact)

    def _start(self) -> _Level:
        p, layers = self.problem, self.problem.num_layers
        keep = [u for u in range(p.num_units) if self.previous[u] < 0]
        best = np.full((len(keep), layers + 1), np.inf)
        for row, u in enumerate(keep):
            cost = p.add.base[u] + p.add.first[u] + p.add.prefix[u]
            allowed = self.reach.first[u].copy()
            allowed[0] = allowed[layers] = False
            best[row] = np.where(allowed, cost, np.inf)
        units = np.array(keep, dtype=np.int64)
        return _Level(np.int64(1) << units, units if self.with_first else np.zeros_like(units), units, best)

    def _prune(self, level: _Level) -> _Level:
        """Drop what cannot beat the best known value; keep at most `max_states` states."""
        masks, inverse = np.unique(level.masks, return_inverse=True)
        total = level.best + self.bound(masks)[inverse]
        limit = min(self.upper, self.best_value)
        hopeless = total >= limit
        level.best[hopeless] = np.inf
        promise = np.where(hopeless, np.inf, total).min(axis=1, initial=np.inf)
        keep = np.nonzero(np.isfinite(promise))[0]
        if len(keep) > self.max_states:
            self.exact = False
            keep = np.sort(keep[np.argpartition(promise[keep], self.max_states)[: self.max_states]])
        return _Level(level.masks[keep], level.firsts[keep], level.lasts[keep], level.best[keep])

    def _extend(self, level: _Level, *, closing: bool) -> _Level:
        parts: list[_Level] = []
        for v in range(self.problem.num_units):
            free = ((level.masks >> v) & 1) == 0
            if self.previous[v] >= 0:
                free &= ((level.masks >> self.previous[v]) & 1) == 1
            rows = np.nonzero(free & self.reach.hops[level.lasts, v])[0]
            if not len(rows):
                continue
            arriving = level.best[rows] + self.problem.hop_add[level.lasts[rows], v][:, None]
            if closing:
                self._close(level, rows, arriving, v)
            parts.append(self._grown(level, rows, arriving, v))
        if not parts:
            none = np.zeros(0, dtype=np.int64)
            return _Level(none, none, none, np.zeros((0, self.problem.num_layers + 1)))
        masks = np.concatenate([part.masks for part in parts])
        firsts = np.concatenate([part.firsts for part in parts])
        lasts = np.concatenate([part.lasts for part in parts])
        order = np.lexsort((lasts, firsts, masks))
        best = np.concatenate([part.best for part in parts])
        return _Level(masks[order], firsts[order], lasts[order], best[order])

    def _grown(self, level: _Level, rows: Ints, arriving: Floats, v: int) -> _Level:
        """States with `v` as the new last unit: best over the old last units, then over where the stage starts."""
        keys = np.stack([level.masks[rows], level.firsts[rows]])
        fresh = np.ones(len(rows), dtype=bool)
        fresh[1:] = np.any(keys[:, 1:] != keys[:, :-1], axis=0)
        starts = np.nonzero(fresh)[0]
        joined = np.minimum.reduceat(arriving, starts, axis=0)
        prefix = self.problem.add.prefix[v]
        best = self.windows[v](joined - prefix[None, :]) + (prefix + self.problem.add.base[v])[None, :]
        best[:, 0] = best[:, -1] = np.inf
        alive = np.isfinite(best).any(axis=1)
        masks = level.masks[rows][starts][alive] | (np.int64(1) << v)
        firsts = level.firsts[rows][starts][alive]
        return _Level(masks, firsts, np.full(len(masks), v, dtype=np.int64), best[alive])

    def _ending(self, v: int) -> Floats:
        """[L + 1]: cost of a last stage on `v` that starts at each layer, without the way back."""
        add, layers = self.problem.add, self.problem.num_layers
        cost: Floats = add.base[v] + add.last[v] + add.prefix[v, layers] - add.prefix[v]
        starts = np.arange(layers + 1)
        return np.where((starts >= self.reach.last[v]) & (starts < layers), cost, np.inf)

    def _close(self, level: _Level, rows: Ints, arriving: Floats, v: int) -> None:
        """Let `v` take all that is left."""
        total = (arriving + self._ending(v)[None, :]).min(axis=1)
        total = total + (self.problem.back_add[v, level.firsts[rows]] if self.with_first else self.cheapest_back[v])
        at = int(np.argmin(total))
        if total[at] < self.best_value and total[at] < self.upper:
            self.best_value = float(total[at])
            self.best_end = (len(self.levels) - 1, int(rows[at]), v)

    def _trace(self) -> tuple[Stage, ...]:
        """Walk back from the best end; every step repeats one minimum."""
        index, row, v = self.best_end
        level, layers = self.levels[index], self.problem.num_layers
        start = int(np.argmin(level.best[row] + self._ending(v)))
        stages = [(v, start, layers)]
        while index > 0:
            v, end = int(level.lasts[row]), start
            mask, first = level.masks[row] & ~(np.int64(1) << v), level.firsts[row]
            before = self.levels[index - 1]
            rows = np.nonzero((before.masks == mask) & (before.firsts == first) & self.reach.hops[before.lasts, v])[0]
            low = int(self.reach.inner[v, end])
            cost = before.best[rows, low:end] + self.problem.hop_add[before.lasts[rows], v][:, None]
            cost = cost - self.problem.add.prefix[v, low:end][None, :]
            at, offset = np.unravel_index(int(np.argmin(cost)), cost.shape)
            start = low + int(offset)
            stages.append((v, start, end))
            index, row, level = index - 1, int(rows[at]), before
        stages.append((int(level.lasts[row]), 0, start))
        return tuple(reversed(stages))


def _back_needs_first(problem: Problem) -> bool:
    """Whether the way back to stage 0 costs differently from one unit to different others."""
    back = problem.back_add.copy()
    np.fill_diagonal(back, np.nan)
    if problem.num_units < 3:
        return problem.num_units == 2
    return bool((np.nanmax(back, axis=1) - np.nanmin(back, axis=1) > 0).any())


def smallest_add(problem: Problem, peak_limit: float, *, upper: float = math.inf, max_states: int = 60_000) -> Found:
    """The arrangement of two or more stages with the smallest A < `upper` and M <= `peak_limit`."""
    if problem.num_units < 2 or problem.num_layers < 2:
        return Found((), math.inf, True)
    search = SubsetSearch(problem, peak_limit, upper=upper, max_states=max_states, with_first=False)
    found = search.run()
    if not _back_needs_first(problem) or (not found.stages and found.exact):
        return found
    best: Found = found
    if found.stages:
        # The cheapest way back was assumed. If it is the true one, the bound is met and the arrangement is the best.
        true_add = problem.sums(found.stages)[0]
        best = Found(found.stages if true_add < upper else (), true_add if true_add < upper else math.inf, found.exact)
        if true_add <= found.add * (1 + 1e-12):
            return best
    limit = min(upper, best.add)
    search = SubsetSearch(problem, peak_limit, upper=limit, max_states=max_states, with_first=True)
    again = search.run()
    return again if again.stages else Found(best.stages, best.add, again.exact)
