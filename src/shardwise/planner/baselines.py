"""What other planners would do with the same units, as arrangements that our cost model can judge.

In: a `Problem`. Out: stages in the order of the units as listed, or None where the rule ends in too little memory. The rules
are written from their sources, simplified to one pipeline without replicas: equal; exo's memory-weighted ring; accelerate's
`infer_auto_device_map` (fill one device after the other by bytes); Petals' choice of windows with the least covered
throughput and shortest route; prima.cpp's Halda (an integer program over layers per device that is linear in them).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from shardwise.planner.assignment import proportional_layers
from shardwise.planner.problem import Problem, Stage

Arrangement = tuple[Stage, ...]
_SCALE = 10**9


def _from_counts(problem: Problem, counts: list[int]) -> Arrangement | None:
    stages, start = [], 0
    for unit, count in enumerate(counts):
        if count > 0:
            stages.append((unit, start, start + count))
            start += count
    arrangement = tuple(stages)
    return arrangement if start == problem.num_layers and problem.fits(arrangement) else None


def equal(problem: Problem) -> Arrangement | None:
    """As many layers for everyone."""
    return _from_counts(problem, proportional_layers(problem.num_layers, [Fraction(1)] * problem.num_units))


def memory_proportional(problem: Problem) -> Arrangement | None:
    """exo: `RingMemoryWeightedPartitioningStrategy`."""
    return _from_counts(problem, proportional_layers(problem.num_layers, [Fraction(int(m)) for m in problem.limit_bytes]))


def byte_greedy(problem: Problem) -> Arrangement | None:
    """accelerate: fill the first device as far as its memory goes, then the next."""
    stages: list[Stage] = []
    start = 0
    for unit in range(problem.num_units):
        end = start
        while end < problem.num_layers and problem.fits(((unit, start, end + 1),)):
            end += 1
        if end > start:
            stages.append((unit, start, end))
            start = end
    return tuple(stages) if start == problem.num_layers else None


def petals_windows(problem: Problem) -> Arrangement | None:
    """Petals: every server takes the window with the least throughput so far; a client takes the quickest chain."""
    layers = problem.num_layers
    covered = np.zeros(layers)
    windows: list[Stage] = []
    for unit in range(problem.num_units):
        length = max((n for n in range(layers + 1) if problem.fits(((unit, 0, n),) if n else ())), default=0)
        length = min(
            length, max((n for n in range(layers + 1) if problem.fits(((unit, layers - n, layers),) if n else ())), default=0)
        )
        if not length:
            continue
        speed = length / max(problem.add.prefix[unit, -1], problem.peak.prefix[unit, -1], 1e-30)
        starts = range(layers - length + 1)
        start = min(starts, key=lambda s: (sorted(covered[s : s + length]), s))
        covered[start : start + length] += speed
        windows.append((unit, start, start + length))
    return _quickest_chain(problem, windows)


def _quickest_chain(problem: Problem, windows: list[Stage]) -> Arrangement | None:
    """Chain of parts of windows from layer 0 to the end, each unit at most once: label setting over layers."""
    best: dict[int, list[tuple[float, Arrangement]]] = {0: [(0.0, ())]}
    for layer in range(problem.num_layers):
        for cost, chain in best.get(layer, []):
            for unit, start, end in windows:
                if start <= layer < end and all(unit != u for u, _, _ in chain):
                    stage = (unit, layer, end)
                    hop = problem.hop_add[chain[-1][0], unit] + problem.hop_peak[chain[-1][0], unit] if chain else 0.0
                    own = problem.add.of(*stage, problem.num_layers) + problem.peak.of(*stage, problem.num_layers)
                    best.setdefault(end, []).append((cost + float(hop) + own, (*chain, stage)))
        for key in best:
            best[key] = sorted(best[key])[:32]
    done = [chain for _, chain in best.get(problem.num_layers, []) if problem.fits(chain)]
    return done[0] if done else None


def halda_like(problem: Problem) -> Arrangement | None:
    """prima.cpp: layers per device that minimize a cost linear in them, devices in the order listed, links a constant each."""
    from ortools.sat.python import cp_model  # heavy

    model = cp_model.CpModel()
    layers = problem.num_layers
    counts, cost = [], []
    for unit in range(problem.num_units):
        per_layer = problem.add.prefix[unit, -1] / layers + problem.peak.prefix[unit, -1] / layers
        hop = float(np.median(problem.hop_add[unit]) + np.median(problem.hop_peak[unit]))
        fixed = problem.add.base[unit] + problem.peak.base[unit] + hop
        size = problem.size.prefix[unit, -1] / layers
        room = problem.limit_bytes[unit] - problem.size.base[unit] - max(problem.size.first[unit], problem.size.last[unit])
        count = model.new_int_var(0, max(0, min(layers, int(room // size))), "")
        used = model.new_bool_var("")
        model.add(count <= layers * used)
        counts.append(count)
        cost.append(round(_SCALE * per_layer) * count + round(_SCALE * fixed) * used)
    model.add(sum(counts) == layers)
    model.minimize(sum(cost))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = 10
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return _from_counts(problem, [solver.value(count) for count in counts])


BASELINES: dict[str, Callable[[Problem], Arrangement | None]] = {
    "equal": equal,
    "memory-proportional (exo)": memory_proportional,
    "byte-greedy (accelerate)": byte_greedy,
    "Petals windows": petals_windows,
    "Halda-like (prima.cpp)": halda_like,
}
