"""The same exact question asked of OR-Tools CP-SAT: an optional-node circuit for the order, element tables for the costs.

In: a `Problem`, a limit on M, a hint. Out: the best arrangement of at least two stages and CP-SAT's own bound. It shares
no code with the search over subsets, so the two check each other (ADR 0020 tells why it is not used for planning). Costs are
rounded to whole microseconds; the bound allows for it. No solution within the time gives no stages.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from shardwise.planner.problem import Problem, Reach, Stage

_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class CircuitFound:
    """Stages (empty where nothing was found), their A, a lower bound on A, and whether CP-SAT proved it."""

    stages: tuple[Stage, ...]
    add: float
    bound: float
    proven: bool


class _Circuit:
    """The model: node U is the outside, an arc from it opens the pipeline, an arc to it closes it."""

    def __init__(self, problem: Problem, reach: Reach) -> None:
        self.problem, self.reach = problem, reach
        self.model = cp_model.CpModel()
        count, layers = problem.num_units, problem.num_layers
        self.used = [self.model.new_bool_var("") for _ in range(count)]
        self.starts = [self.model.new_int_var(0, layers - 1, "") for _ in range(count)]
        self.ends = [self.model.new_int_var(0, layers, "") for _ in range(count)]
        self.opens = [self.model.new_bool_var("") for _ in range(count)]
        self.closes = [self.model.new_bool_var("") for _ in range(count)]
        self.follows: dict[tuple[int, int], cp_model.IntVar] = {}
        self.cost: list[cp_model.LinearExpr | int] = []
        self._order()
        for unit in range(count):
            self._stage(unit)
        self._way_back()
        self.model.add(sum(end - start for start, end in zip(self.starts, self.ends)) == layers)
        self.model.minimize(sum(self.cost))

    def _order(self) -> None:
        count = self.problem.num_units
        arcs: list[tuple[int, int, cp_model.IntVar]] = []
        for u in range(count):
            arcs += [(count, u, self.opens[u]), (u, count, self.closes[u]), (u, u, self.used[u].negated())]
            for v in range(count):
                if u != v and self.reach.hops[u, v]:
                    literal = self.model.new_bool_var("")
                    self.follows[u, v] = literal
                    arcs.append((u, v, literal))
                    self.model.add(self.starts[v] == self.ends[u]).only_enforce_if(literal)
                    self.cost.append(self._whole(self.problem.hop_add[u, v]) * literal)
        self.model.add_circuit(arcs)
        stages = sum(self.used)
        self.model.add(stages >= max(2, self.problem.form.min_stages))
        self.model.add(stages <= min(count, self.problem.num_layers, self.problem.form.max_stages))

    @staticmethod
    def _whole(seconds: float) -> int:
        return round(float(seconds) * _PER_S)

    def _stage(self, u: int) -> None:
        problem, layers = self.problem, self.problem.num_layers
        model, used, start, end = self.model, self.used[u], self.starts[u], self.ends[u]
        model.add(end > start).only_enforce_if(used)
        model.add(end == start).only_enforce_if(used.negated())
        model.add(start == 0).only_enforce_if(self.opens[u])
        model.add(end == layers).only_enforce_if(self.closes[u])
        model.add(end < layers).only_enforce_if([used, self.closes[u].negated()])
        model.add(start > 0).only_enforce_if([used, self.opens[u].negated()])
        inner = [used, self.opens[u].negated(), self.closes[u].negated()]
        ends = np.arange(layers + 1)
        longest_inner = int(np.max(ends - np.minimum(self.reach.inner[u], ends)))
        steps = np.diff(problem.add.prefix[u])
        if np.allclose(steps, steps[0], rtol=1e-9, atol=0.0):  # equal layers: linear, which CP-SAT relaxes well
            self.cost.append(self._whole(steps[0]) * (end - start))
            model.add(end - start <= max(longest_inner, layers - int(self.reach.last[u]), self._longest_first(u)))
        else:
            table = [self._whole(value) for value in problem.add.prefix[u]]
            at_start, at_end = (model.new_int_var(0, table[-1], "") for _ in range(2))
            model.add_element(start, table, at_start)
            model.add_element(end, table, at_end)
            self.cost.append(at_end - at_start)
        if np.array_equal(np.minimum(self.reach.inner[u], ends), np.maximum(0, ends - longest_inner)):
            model.add(end - start <= longest_inner).only_enforce_if(inner)
        else:
            low = model.new_int_var(0, layers, "")
            model.add_element(end, [int(min(k, self.reach.inner[u, k])) for k in range(layers + 1)], low)
            model.add(start >= low).only_enforce_if(inner)
        model.add(start >= int(self.reach.last[u])).only_enforce_if(self.closes[u])
        model.add(end <= self._longest_first(u)).only_enforce_if(self.opens[u])
        self.cost.append(self._whole(problem.add.base[u]) * used)
        self.cost.append(self._whole(problem.add.first[u]) * self.opens[u])
        self.cost.append(self._whole(problem.add.last[u]) * self.closes[u])

    def _longest_first(self, u: int) -> int:
        """Layers of the longest stage that opens the pipeline on `u`."""
        return int(np.max(np.nonzero(self.reach.first[u, : self.problem.num_layers])[0], initial=0))

    def _way_back(self) -> None:
        for first in range(self.problem.num_units):
            for last in range(self.problem.num_units):
                back = self._whole(self.problem.back_add[last, first])
                if first != last and back:
                    both = self.model.new_bool_var("")
                    self.model.add_bool_or([self.opens[first].negated(), self.closes[last].negated(), both])
                    self.cost.append(back * both)

    def hint(self, stages: tuple[Stage, ...]) -> None:
        """Start from a known arrangement."""
        known = {u: (start, end) for u, start, end in stages}
        for u in range(self.problem.num_units):
            self.model.add_hint(self.used[u], u in known)
            start, end = known.get(u, (0, 0))
            self.model.add_hint(self.starts[u], start)
            self.model.add_hint(self.ends[u], end)
        order = [u for u, _, _ in stages]
        for (u, v), literal in self.follows.items():
            self.model.add_hint(literal, (u, v) in itertools.pairwise(order))

    def solve(self, time_limit_s: float, seed: int) -> CircuitFound:
        """Run CP-SAT; its portfolio of eight searches proves what one search alone does not."""
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = time_limit_s
        solver.parameters.num_workers = 8
        solver.parameters.linearization_level = 2
        solver.parameters.random_seed = seed
        status = solver.solve(self.model)
        slack = (self.problem.num_layers + 4.0 * self.problem.num_units) / _PER_S
        if status == cp_model.INFEASIBLE:
            return CircuitFound((), math.inf, math.inf, True)
        bound = max(0.0, solver.best_objective_bound / _PER_S - slack)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return CircuitFound((), math.inf, bound, False)
        stages = [
            (u, solver.value(self.starts[u]), solver.value(self.ends[u]))
            for u in range(self.problem.num_units)
            if solver.value(self.used[u])
        ]
        ordered = tuple(sorted(stages, key=lambda s: s[1]))
        return CircuitFound(ordered, self.problem.sums(ordered)[0], bound, status == cp_model.OPTIMAL)


def smallest_add_by_circuit(
    problem: Problem, peak_limit: float, *, hint: tuple[Stage, ...] = (), time_limit_s: float = 10.0, seed: int = 0
) -> CircuitFound:
    """The arrangement of two or more stages with the smallest A and M <= `peak_limit`."""
    circuit = _Circuit(problem, problem.reach(peak_limit))
    if hint:
        circuit.hint(hint)
    return circuit.solve(time_limit_s, seed)
