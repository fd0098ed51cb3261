"""The best arrangement for any objective `combine(A, M)`: exact searches for A under ever tighter limits on M.

In: a `Problem`. Out: `Searched`: the arrangement, its value, a proven lower bound. An interval of M has the bound
`combine(smallest A below its upper end, its lower end)`; the interval with the smallest bound is split until the bound
meets the best value (best-first branch and bound on one number). Nothing fails: no arrangement gives an infinite value.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.planner.problem import Problem, Stage
from shardwise.planner.search_bottleneck import peak_values, smallest_peak
from shardwise.planner.search_bound import RemainingBound, interchangeable
from shardwise.planner.search_dp import Budget, Found, smallest_add

TOLERANCE = 1e-9
BEAM_STATES = 256
FIRST_GUESSES = 5
WIDE = 0.004  # of the value: wider intervals are split before they are searched
EXACT_STATES = 60_000


@dataclass(frozen=True, slots=True)
class Searched:
    """Result for one problem."""

    stages: tuple[Stage, ...]
    value: float
    bound: float  # nothing has a smaller value
    method: str

    @property
    def optimal(self) -> bool:
        """Proven, to the tolerance of the arithmetic."""
        return math.isfinite(self.value) and self.bound >= self.value * (1 - 10 * TOLERANCE)


def best_single(problem: Problem) -> Searched:
    """The best unit that holds everything."""
    options = [(problem.value_of(((u, 0, problem.num_layers),)), u) for u in range(problem.num_units)]
    value, unit = min(options, default=(math.inf, -1))
    stages = ((unit, 0, problem.num_layers),) if math.isfinite(value) else ()
    return Searched(stages, value, value, "enumeration")


@dataclass(frozen=True, slots=True, order=True)
class _Interval:
    """Arrangements whose M is one of `values[low..high]`; none of them has a value below `bound`."""

    bound: float
    low: int
    high: int
    add: float  # no arrangement with M <= values[high] has a smaller A


class _Branching:
    """Best-first splitting of the range of M."""

    def __init__(self, problem: Problem, incumbent: Searched, lowest: float, budget: Budget) -> None:
        self.problem, self.budget = problem, budget
        self.stages, self.value = incumbent.stages, incumbent.value
        self.exact, self.max_states = True, BEAM_STATES if problem.num_units <= 16 else BEAM_STATES // 3
        values = peak_values(problem) if problem.form.peak_weight > 0 else np.zeros(1)
        self.values = values[np.searchsorted(values, lowest * (1 - TOLERANCE)) :]
        self.heap: list[_Interval] = []

    def solve(self, low: int, high: int) -> Found:
        """Smallest A with M <= values[high] that can still improve, M being at least values[low]."""
        upper = self.problem.form.add_limit(self.value * (1 - TOLERANCE), float(self.values[low]))
        limit = float(self.values[high]) if self.problem.form.peak_weight > 0 else math.inf
        found = smallest_add(self.problem, limit, upper=upper, max_states=self.max_states, budget=self.budget)
        if found.stages:
            value = self.problem.value_of(found.stages)
            if value < self.value:
                self.stages, self.value = found.stages, value
        return found

    def push(self, low: int, high: int, add: float) -> None:
        """Remember an interval that may hold something better."""
        if low <= high:
            bound = self.problem.form.combine(add, float(self.values[low]))
            if bound < self.value * (1 - TOLERANCE):
                heapq.heappush(self.heap, _Interval(bound, low, high, add))

    def relaxed_add(self, high: int) -> float:
        """A bound on A for M <= values[high] that costs next to nothing."""
        limit = float(self.values[high]) if self.problem.form.peak_weight > 0 else math.inf
        return RemainingBound.of(self.problem, self.problem.reach(limit)).whole()

    def split(self, interval: _Interval) -> None:
        """Halves: the upper one keeps the bound on A, the lower one gets a better one."""
        middle = (interval.low + interval.high) // 2
        self.push(middle + 1, interval.high, interval.add)
        self.push(interval.low, middle, max(interval.add, self.relaxed_add(middle)))

    def run(self, max_states: int) -> float:
        """Returns the proven bound. Wide intervals are split first: a narrow one leaves the exact search little room."""
        self.max_states = max_states
        self.push(0, len(self.values) - 1, self.relaxed_add(len(self.values) - 1))
        while self.heap:
            interval = heapq.heappop(self.heap)
            if interval.bound >= self.value * (1 - TOLERANCE):
                return min(self.value, interval.bound)
            spread = self.problem.form.combine(interval.add, float(self.values[interval.high])) - interval.bound
            if interval.low < interval.high and (not math.isfinite(self.value) or spread > WIDE * self.value):
                self.split(interval)
                continue
            found = self.solve(interval.low, interval.high)
            if not found.exact:
                if interval.low < interval.high and not self.budget.spent:
                    self.split(interval)
                    continue
                self.exact = False
                return interval.bound
            if found.stages:
                peak = self.problem.sums(found.stages)[1]
                below = int(np.searchsorted(self.values, peak * (1 - TOLERANCE))) - 1
                middle = (interval.low + below) // 2
                self.push(middle + 1, below, found.add)
                self.push(interval.low, min(middle, below), max(found.add, self.relaxed_add(middle)))
        return self.value


def search(problem: Problem, *, beat: float = math.inf, max_states: int = EXACT_STATES, budget: Budget | None = None) -> Searched:
    """The best arrangement with a value below `beat`, one stage or many, with a bound; no stages where there is none."""
    budget = Budget(math.inf) if budget is None else budget
    problem = dataclasses.replace(problem, previous=tuple(interchangeable(problem)))
    single = Searched((), math.inf, math.inf, "enumeration")
    if problem.form.min_stages <= 1:
        single = best_single(problem)
    if problem.num_units < 2 or problem.num_layers < 2 or problem.form.max_stages < 2:
        return single
    if single.value >= beat:
        single = Searched((), beat, beat, "enumeration")
    if problem.form.add_weight == 0:
        return _search_peak(problem, single, max_states, budget)
    lowest = 0.0
    if problem.form.peak_weight > 0:
        peak = smallest_peak(problem, max_states=max_states, budget=Budget(budget.cells / 4))
        if peak.exact and not peak.stages:
            return single
        lowest = peak.bound
    branching = _Branching(problem, single, lowest, budget)
    _first_guess(branching)
    bound = branching.run(max_states)
    method = "dynamic programming over subsets" + ("" if branching.exact else ", cut off")
    return Searched(branching.stages, branching.value, bound, method)


def _search_peak(problem: Problem, single: Searched, max_states: int, budget: Budget) -> Searched:
    """Objectives that are M alone."""
    limit = single.value / max(problem.form.peak_weight, 1e-300)
    found = smallest_peak(problem, upper=limit, max_states=max_states, budget=budget)
    value = problem.value_of(found.stages) if found.stages else math.inf
    stages, best = (found.stages, value) if value < single.value else (single.stages, single.value)
    bound = best if found.exact else min(best, found.bound * problem.form.peak_weight)
    return Searched(stages, best, bound, "bisection over subsets")


def _first_guess(branching: _Branching) -> None:
    """A few beams under ever tighter limits on M: good values to beat."""
    high = len(branching.values) - 1
    for _ in range(FIRST_GUESSES):
        found = branching.solve(0, high)
        if not found.stages or high == 0:
            break
        peak = branching.problem.sums(found.stages)[1]
        high = max(0, int(np.searchsorted(branching.values, peak * (1 - TOLERANCE))) // 2)


def search_forms(problems: Sequence[Problem], *, budget: Budget) -> tuple[int, Searched]:
    """The best over several forms of one objective (index of the problem, result); later ones must beat earlier ones."""
    best, at, bounds = Searched((), math.inf, math.inf, ""), 0, []
    for index in reversed(range(len(problems))):
        share = Budget(budget.cells / (index + 1))
        granted = share.cells
        found = search(problems[index], beat=best.value, budget=share)
        budget.cells -= granted - share.cells if math.isfinite(granted) else 0.0
        bounds.append(found.bound)
        if found.stages and found.value < best.value:
            best, at = found, index
    return at, dataclasses.replace(best, bound=min([best.value, *bounds]))
