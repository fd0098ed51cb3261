"""About equal stages that the architecture allows. Pure.

Most architectures may be cut anywhere; a few only at some layers, or only so that each stage has layers of certain kinds
(`model.families`, which tells of GGUF models in llama.cpp; other models may be cut anywhere). Fails when: no such split
exists (`UsageError` that names the possible numbers of stages).
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

from shardwise.errors import UsageError
from shardwise.model.description import ModelDescription
from shardwise.model.families import Family, cut_points, described_kinds, require_proved, slice_problem


def even_split(model: ModelDescription, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, as near to equal as allowed; the first ones get the rest, because the last has the head too."""
    family = require_proved(model.architecture) if model.source.kind == "gguf" else Family(architecture=model.architecture)
    best = _best_cuts(model, family, num_stages)
    if best is None:
        most = len(cut_points(family, model.num_layers)) + 1
        possible = [n for n in range(1, most + 1) if _best_cuts(model, family, n) is not None]
        raise UsageError(
            f"a {model.architecture} model of {model.num_layers} layers cannot be split into {num_stages} stages",
            where="stages",
            hint=f"possible: {', '.join(map(str, possible))}",
            possible=possible,
        )
    borders = [0, *best, model.num_layers]
    return tuple(end - start for start, end in pairwise(borders))


def _best_cuts(model: ModelDescription, family: Family, num_stages: int) -> list[int] | None:
    """Cuts with the least sum of squared distances from those of an equal split."""
    cuts, num_layers, kinds = cut_points(family, model.num_layers), model.num_layers, described_kinds(model)
    base, rest = divmod(num_layers, num_stages)
    targets = [base * i + min(i, rest) for i in range(1, num_stages)]

    @cache
    def allowed(start: int, end: int) -> bool:
        return slice_problem(family, start, end, num_layers, kinds) is None

    paths: dict[int, tuple[int, list[int]]] = {0: (0, [])}  # last cut -> (distance, cuts up to it)
    for target in targets:
        longer: dict[int, tuple[int, list[int]]] = {}
        for start, (distance, before) in paths.items():
            for cut in cuts:
                total = distance + (cut - target) ** 2
                if cut > start and (cut not in longer or total < longer[cut][0]) and allowed(start, cut):
                    longer[cut] = (total, [*before, cut])
        paths = longer
    ends = [found for last, found in paths.items() if allowed(last, num_layers)]
    return min(ends, default=(0, None), key=lambda found: found[0])[1]
