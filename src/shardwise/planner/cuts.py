"""Where a model may be cut: layer boundaries between which every run of layers can be a stage.

In: a model description. Out: boundaries from 0 to the number of layers. A few architectures forbid some cuts (llama.cpp derives
a layer's kind from its index, or wants layers of two kinds in each slice: `model.families`); for these the search looks at
whole blocks of layers only. Where a family forbids single lengths some allowed cuts are left out, so that any union of
blocks is allowed. Architectures that no parity test proves are planned as if every cut were allowed. Nothing here fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache

from shardwise.model.description import ModelDescription
from shardwise.model.families import FAMILIES, cut_points, described_kinds, slice_problem

_STRIDES = range(2, 13)


@lru_cache(maxsize=64)
def boundaries(model: ModelDescription) -> tuple[int, ...]:
    """Layer indices 0 = b_0 < b_1 < ... = number of layers; the layers [b_i, b_j) can be a stage for all i < j."""
    total = model.num_layers
    family = FAMILIES.get(model.architecture)
    if family is None:
        return tuple(range(total + 1))
    kinds = described_kinds(model)

    def allowed(start: int, end: int) -> bool:
        return slice_problem(family, start, end, total, kinds) is None

    cuts = cut_points(family, total)
    found = _grown(cuts, total, allowed)
    if len(found) < total + 1:  # single forbidden lengths can leave a large hole: blocks of equal length may avoid them
        strided = [_grown([cut for cut in cuts if cut % stride == 0], total, allowed) for stride in _STRIDES]
        found = min([found, *strided], key=lambda b: (max(y - x for x, y in itertools.pairwise(b)), -len(b)))
    return found


def _grown(cuts: list[int], total: int, allowed: Callable[[int, int], bool]) -> tuple[int, ...]:
    """As many of `cuts` as go together, from the front."""
    found = [0]
    for cut in cuts:
        if all(allowed(start, cut) for start in found):
            found.append(cut)
    while len(found) > 1 and not all(allowed(start, total) for start in found):
        found.pop()
    return (*found, total)


def limits_cuts(model: ModelDescription) -> bool:
    """Whether some boundary between layers is no place to cut."""
    return len(boundaries(model)) < model.num_layers + 1
