"""The best arrangement for any objective `combine(A, M)`: exact searches for A under ever tighter limits on M.

In: a `Problem`. Out: `Searched`: the arrangement, its value, a proven lower bound. An interval of M has the bound
`combine(smallest A below its upper end, its lower end)`; the interval with the smallest bound is split until the bound
meets the best value (best-first branch and bound on one number). Nothing fails: no arrangement gives an infinite value.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from shardwise.planner.problem import Floats, Problem, Stage
from shardwise.planner.search_bottleneck import peak_values, smallest_peak
from shardwise.planner.search_dp import Found, smallest_add

TOLERANCE = 1e-9
BEAM_STATES = 256
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


class _Branching:
    """Best-first splitting of the range of M."""

    def __init__(self, problem: Problem, incumbent: Searched, max_states: int) -> None:
        self.problem, self.max_states = problem, max_states
        self.stages, self.value = incumbent.stages, incumbent.value
        self.exact = True

    def solve(self, low: float, high: float) -> Found:
        """Smallest A with M <= high that can still improve, M being at least `low`."""
        upper = self.problem.form.add_limit(self.value * (1 - TOLERANCE), low)
        found = smallest_add(self.problem, high, upper=upper, max_states=self.max_states)
        self.exact &= found.exact
        if found.stages:
            value = self.problem.value_of(found.stages)
            if value < self.value:
                self.stages, self.value = found.stages, value
        return found

    def run(self, lowest: float) -> float:
        """Returns the proven bound. Intervals are indices into the sorted values that M can have."""
        form = self.problem.form
        values = peak_values(self.problem) if form.peak_weight > 0 else np.zeros(1)
        found = self.solve(lowest, math.inf)
        if not found.stages:
            return self.value
        low = int(np.searchsorted(values, lowest * (1 - TOLERANCE)))
        heap: list[tuple[float, int, int, float]] = []
        self._push(heap, values, low, found)
        while heap:
            bound, low, high, add = heapq.heappop(heap)
            if bound >= self.value * (1 - TOLERANCE):
                return min(self.value, bound)
            middle = (low + high) // 2
            if middle < high:
                heapq.heappush(heap, (form.combine(add, float(values[middle + 1])), middle + 1, high, add))
            below = self.solve(float(values[low]), float(values[middle]))
            if below.stages:
                self._push(heap, values, low, below)
        return self.value

    def _push(self, heap: list[tuple[float, int, int, float]], values: Floats, low: int, found: Found) -> None:
        """What may be better than `found` has a smaller M: the values from `low` to just below its own."""
        peak = self.problem.sums(found.stages)[1]
        high = int(np.searchsorted(values, peak * (1 - TOLERANCE))) - 1
        if high >= low:
            heapq.heappush(heap, (self.problem.form.combine(found.add, float(values[low])), low, high, found.add))


def search(problem: Problem, *, max_states: int = EXACT_STATES) -> Searched:
    """The best arrangement, one stage or many, with a bound."""
    single = best_single(problem) if problem.form.min_stages <= 1 else Searched((), math.inf, math.inf, "")
    if problem.num_units < 2 or problem.num_layers < 2 or problem.form.max_stages < 2:
        return single
    if problem.form.add_weight == 0:
        found = smallest_peak(problem, upper=single.value / max(problem.form.peak_weight, 1e-300))
        value = problem.value_of(found.stages) if found.stages else math.inf
        stages, best = (found.stages, value) if value < single.value else (single.stages, single.value)
        return Searched(stages, best, best if found.exact else 0.0, "bisection over subsets")
    lowest = 0.0
    if problem.form.peak_weight > 0:
        peak = smallest_peak(problem)
        lowest = peak.add if peak.exact and peak.stages else 0.0
    branching = _Branching(problem, single, BEAM_STATES)
    branching.solve(lowest, math.inf)
    branching.exact, branching.max_states = True, max_states
    bound = branching.run(lowest)
    return Searched(branching.stages, branching.value, bound if branching.exact else 0.0, "dynamic programming over subsets")
