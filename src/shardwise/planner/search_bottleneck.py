"""Exact search for the smallest M: bisection over its possible values.

In: a `Problem`. Out: an arrangement of at least two stages and its M. Whether a limit on M can be kept is asked of the
search over subsets, which stops at the first arrangement; sets of units that cannot hold the remaining layers under the
limit are pruned, and near the optimum that is nearly all of them. A quick beam answers most of the yeses. Never fails.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from shardwise.planner.problem import Floats, Problem, Stage
from shardwise.planner.search_dp import Budget, Found, SubsetSearch

BEAM_STATES = 128


def peak_values(problem: Problem) -> Floats:
    """All values that M can have, sorted: every stage on every unit, every hop."""
    layers = problem.num_layers
    values = [problem.hop_peak[~np.eye(problem.num_units, dtype=bool)]]
    starts, ends = np.triu_indices(layers + 1, 1)
    extra_first, extra_last = starts == 0, ends == layers
    cost = problem.peak
    for u in range(problem.num_units):
        stage = cost.prefix[u, ends] - cost.prefix[u, starts] + cost.base[u]
        values.append(stage + extra_first * cost.first[u] + extra_last * cost.last[u])
    return np.unique(np.concatenate(values))


def _as_additive(problem: Problem) -> Problem:
    """The same stages and limits with the sum of M's parts as A: a good order for the beam, any answer will do."""
    return dataclasses.replace(problem, add=problem.peak, hop_add=problem.hop_peak, back_add=np.zeros_like(problem.back_add))


class _Feasibility:
    def __init__(self, problem: Problem, max_states: int, budget: Budget | None) -> None:
        self.problem, self.max_states, self.budget = _as_additive(problem), max_states, budget
        self.exact = True

    def check(self, peak_limit: float) -> tuple[Stage, ...]:
        """An arrangement with M <= `peak_limit`, or nothing."""
        found = self._run(peak_limit, min(BEAM_STATES, self.max_states))
        if not found.stages and not found.exact and self.max_states > BEAM_STATES:
            found = self._run(peak_limit, self.max_states)
        if not found.stages:
            self.exact &= found.exact
        return found.stages

    def _run(self, peak_limit: float, max_states: int) -> Found:
        search = SubsetSearch(
            self.problem, peak_limit, upper=math.inf, max_states=max_states, any_will_do=True, budget=self.budget
        )
        return search.run()


@dataclasses.dataclass(frozen=True, slots=True)
class FoundPeak:
    """The arrangement with the smallest M, its M, and a proven lower bound on M."""

    stages: tuple[Stage, ...]  # empty where nothing was found
    peak: float
    bound: float
    exact: bool


def smallest_peak(
    problem: Problem, *, upper: float = math.inf, max_states: int = 60_000, budget: Budget | None = None
) -> FoundPeak:
    """The arrangement of two or more stages with the smallest M < `upper`."""
    if problem.num_units < 2 or problem.num_layers < 2:
        return FoundPeak((), math.inf, math.inf, True)
    values = peak_values(problem)
    values = values[values < upper]
    feasibility = _Feasibility(problem, max_states, budget)
    low, high, proven = 0, len(values), 0
    best: tuple[Stage, ...] = ()
    while low < high:
        middle = (low + high) // 2
        found = feasibility.check(float(values[middle]))
        if found:
            best = found
            high = min(middle, int(np.searchsorted(values, problem.sums(found)[1] * (1 - 1e-12))))
        else:
            low = middle + 1
            proven = low if feasibility.exact else proven
    bound = float(values[proven]) if proven < len(values) else upper
    if not best:
        return FoundPeak((), math.inf, bound, feasibility.exact)
    peak = problem.sums(best)[1]
    return FoundPeak(best, peak, peak if feasibility.exact else min(bound, peak), feasibility.exact)
