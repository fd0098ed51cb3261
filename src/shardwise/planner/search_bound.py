"""A lower bound on what the remaining layers cost, and which units are interchangeable.

In: a `Problem` and a limit on M. Out: `RemainingBound`, used to prune the exact search and to state a gap where a search
is not exact. The bound is the linear relaxation of a fixed-charge knapsack: remaining work goes to the best units that
are still free, each pays its overhead and cheapest hop in proportion to the capacity used. Nothing here fails.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.planner.problem import Floats, Ints, Problem, Reach


@dataclass(frozen=True, slots=True)
class RemainingBound:
    """Lower bound of A for layers [k, L), given the units that are taken."""

    order: Ints  # [U] units by cost a unit of work
    rate: Floats  # [U] seconds of A per unit of work, overheads spread over the capacity
    capacity: Floats  # [U] work that one stage can hold
    work_left: Floats  # [L + 1]
    ending: float  # what the last stage and the way back cost at least
    last_loss: Floats  # [U] work that a unit holds less as the last stage
    first_hop: float  # at most this much of the bound is a hop into the first stage, which there is not

    @staticmethod
    def of(problem: Problem, reach: Reach) -> RemainingBound:
        """Work is the mean time of a layer over all units, so that equal layers make the bound tight."""
        layers = problem.num_layers
        times = np.diff(problem.add.prefix, axis=1)  # [U, L]
        work = times.mean(axis=0)
        if not np.any(work > 0):
            work = np.ones(layers)
        work = np.maximum(work, 1e-30)
        total = np.concatenate([[0.0], np.cumsum(work)])
        rate = (times / work).min(axis=1)
        ends = np.arange(layers + 1)
        starts = np.minimum(reach.inner, ends)
        capacity = (total[ends] - total[starts]).max(axis=1)
        as_last = total[layers] - total[np.minimum(reach.last, layers)]
        capacity = np.maximum(capacity, as_last)
        count = problem.num_units
        others = problem.hop_add + np.where(np.eye(count, dtype=bool), np.inf, 0.0)
        cheapest = others.min(axis=0) if count > 1 else np.zeros(count)
        with np.errstate(divide="ignore", invalid="ignore"):
            spread = np.where(capacity > 0, rate + (problem.add.base + cheapest) / capacity, np.inf)
        back = problem.back_add + np.where(np.eye(count, dtype=bool), np.inf, 0.0)
        ending = float(problem.add.last.min() + (back.min() if count > 1 else 0.0))
        usable = np.where(capacity > 0, spread, 1e300)
        return RemainingBound(
            np.argsort(usable, kind="stable").astype(np.int64),
            np.where(capacity > 0, spread, 0.0),
            capacity,
            total[layers] - total,
            ending,
            capacity - as_last,
            float(np.where(np.isfinite(cheapest), cheapest, 0.0).max(initial=0.0)),
        )

    def whole(self) -> float:
        """Lower bound of A for any arrangement of two or more stages; infinite where none can be."""
        total = float(self(np.zeros(1, dtype=np.int64), 0, 1)[0, 0])
        return max(0.0, total - self.first_hop)

    def __call__(self, masks: Ints, low: int, high: int) -> Floats:
        """[N, high - low] for N sets of taken units (bits) and the layer counts from `low` on; infinite where the free
        units cannot hold the rest, of which the last stage holds less than an inner one."""
        free = ((masks[:, None] >> np.arange(len(self.capacity))) & 1) == 0  # [N, U]
        room = free @ self.capacity - np.where(free, self.last_loss, np.inf).min(axis=1)
        wanted = self.work_left[low:high]
        left = np.repeat(wanted[None, :], len(masks), axis=0)
        bound = np.full_like(left, self.ending)
        for unit in self.order:
            if self.capacity[unit] <= 0:
                continue
            if not left.any():
                break
            take = np.minimum(left, np.where(free[:, unit], self.capacity[unit], 0.0)[:, None])
            bound += take * self.rate[unit]
            left -= take
        bound[wanted[None, :] > room[:, None] + 1e-9 * self.work_left[0]] = np.inf
        return bound


def link_classes(matrices: tuple[Floats, ...]) -> tuple[Ints, list[list[int]]]:
    """Group units whose rows are equal in every matrix, their own columns aside: (class of each unit, members)."""
    count = matrices[0].shape[0]
    if all(_uniform(matrix) for matrix in matrices):
        return np.zeros(count, dtype=np.int64), [list(range(count))]
    class_of = np.full(count, -1, dtype=np.int64)
    members: list[list[int]] = []
    for unit in range(count):
        for index, group in enumerate(members):
            if all(_alike(matrix, unit, group) for matrix in matrices):
                class_of[unit] = index
                group.append(unit)
                break
        else:
            class_of[unit] = len(members)
            members.append([unit])
    return class_of, members


def _uniform(matrix: Floats) -> bool:
    """Whether every pair of different units costs the same."""
    between = matrix[~np.eye(matrix.shape[0], dtype=bool)]
    return len(between) == 0 or bool(between.min() == between.max())


def _alike(matrix: Floats, unit: int, group: list[int]) -> bool:
    """Whether any member and `unit` see every third unit, and each other's column, at the same cost."""
    for other in group:
        columns = np.ones(matrix.shape[0], dtype=bool)
        columns[[unit, other]] = False
        if not np.array_equal(matrix[unit, columns], matrix[other, columns]):
            return False
    for column in (*group, unit):
        seen = [matrix[u, column] for u in (*group, unit) if u != column]
        if len(set(seen)) > 1:
            return False
    return True


def interchangeable(problem: Problem) -> list[int]:
    """For each unit the unit before it that is its equal in every cost and link, or -1: equals are used in order."""
    if problem.previous:
        return list(problem.previous)
    previous = [-1] * problem.num_units
    for j in range(problem.num_units):
        for i in range(j - 1, -1, -1):
            if _equal(problem, i, j):
                previous[j] = i
                break
    return previous


def _equal(problem: Problem, i: int, j: int) -> bool:
    if problem.limit_bytes[i] != problem.limit_bytes[j]:
        return False
    for cost in (problem.add, problem.peak):
        same = cost.base[i] == cost.base[j] and cost.first[i] == cost.first[j] and cost.last[i] == cost.last[j]
        if not same or not np.array_equal(cost.prefix[i], cost.prefix[j]):
            return False
    others = [k for k in range(problem.num_units) if k not in (i, j)]
    for hops in (problem.hop_add, problem.hop_peak, problem.back_add):
        if hops[i, j] != hops[j, i] or not np.array_equal(hops[i, others], hops[j, others]):
            return False
        if not np.array_equal(hops[others, i], hops[others, j]):
            return False
    return True
