"""What of a model can be split how: by layers, by tensors, by experts, as copies. Facts only; whether it pays is the
planner's business. Nothing here fails."""

from __future__ import annotations

from shardwise.model.description import ModelDescription
from shardwise.model.families import FAMILIES, Family, cut_points, described_kinds, slice_problem
from shardwise.records import Record

MAX_EVEN_PARTS = 1024  # nobody has more machines for one copy


class SplitOption(Record):
    """One way to split. `max_parts` counts the machines that can take part; `even_parts` are sizes with equal shares."""

    strategy: str  # layer_wise | tensor_parallel | expert_parallel | data_parallel
    possible: bool
    max_parts: int
    even_parts: tuple[int, ...] = ()
    note: str = ""


def split_options(model: ModelDescription) -> tuple[SplitOption, ...]:
    """All four ways, possible or not, with the reason."""
    return (_by_layers(model), _by_tensors(model), _by_experts(model), _copies(model))


def _by_layers(model: ModelDescription) -> SplitOption:
    count = model.num_layers
    if count < 2:
        return SplitOption(strategy="layer_wise", possible=False, max_parts=1, note="there is only one layer")
    in_llama_cpp = model.source.kind in ("gguf", "preset")  # torch computes layers wherever they are
    family = FAMILIES.get(model.architecture) if in_llama_cpp else None
    if family is None:
        note = "at any layer"
        if in_llama_cpp:
            note += f"; '{model.architecture}' is not proved to compute the same when it is split: it can be planned, but not run"
        return SplitOption(strategy="layer_wise", possible=True, max_parts=count, even_parts=_divisors(count, count), note=note)
    cuts = cut_points(family, count)
    if not cuts:
        note = f"llama.cpp computes '{model.architecture}' with {count} layers in a way that no slice can repeat"
        return SplitOption(strategy="layer_wise", possible=False, max_parts=1, note=note)
    stages = _Stages(model, family)
    most = stages.most()
    note = (
        "at any layer" if len(cuts) == count - 1 else f"only after the layers {', '.join(str(cut - 1) for cut in cuts[:8])} ..."
    )
    note += "" if most == len(cuts) + 1 else ", but each stage needs layers of every kind"
    even = tuple(n for n in _divisors(count, most) if stages.allows_equal(n))
    return SplitOption(strategy="layer_wise", possible=most > 1, max_parts=most, even_parts=even, note=note)


class _Stages:
    """Which runs of layers an architecture allows as a stage."""

    def __init__(self, model: ModelDescription, family: Family) -> None:
        self.count = model.num_layers
        self.family = family
        self.kinds = described_kinds(model)
        self.borders = [0, *cut_points(family, self.count), self.count]

    def allows(self, start: int, end: int) -> bool:
        return slice_problem(self.family, start, end, self.count, self.kinds) is None

    def allows_equal(self, parts: int) -> bool:
        size = self.count // parts
        return all(self.allows(start, start + size) for start in range(0, self.count, size))

    def most(self) -> int:
        """The largest number of stages; each is as short as the rest allows, tried for every border."""
        if len(self.borders) == self.count + 1 and all(self.allows(i, i + 1) for i in range(self.count)):
            return self.count
        best = {0: 0}
        for index, end in enumerate(self.borders[1:], 1):
            reachable = [best[start] + 1 for start in self.borders[:index] if start in best and self.allows(start, end)]
            if reachable:
                best[end] = max(reachable)
        return best.get(self.count, 1)


def _by_tensors(model: ModelDescription) -> SplitOption:
    """Attention is split by heads: as many ranks as every attending layer has key heads (MLA: heads)."""
    attending = [layer.kv for layer in model.layers if layer.kv.elements_per_token()]
    if not attending:
        note = "no layer has attention heads to share out"
        return SplitOption(strategy="tensor_parallel", possible=False, max_parts=1, note=note)
    heads = min(model.num_heads if kv.value_dim == 0 else kv.num_kv_heads for kv in attending)
    syncs = 2 * model.num_layers
    note = f"by attention heads; {syncs} synchronizations a token, so only over very fast links"
    if heads < 2:
        return SplitOption(strategy="tensor_parallel", possible=False, max_parts=1, note="there is one key head a layer")
    return SplitOption(strategy="tensor_parallel", possible=True, max_parts=heads, even_parts=_divisors(heads, heads), note=note)


def _by_experts(model: ModelDescription) -> SplitOption:
    experts = [layer.experts for layer in model.layers if layer.experts is not None]
    if not experts:
        return SplitOption(strategy="expert_parallel", possible=False, max_parts=1, note="no layer has experts")
    count = min(spec.num_experts for spec in experts)
    note = f"{len(experts)} layers with {experts[-1].num_experts} experts, {experts[-1].num_active} active a token"
    return SplitOption(
        strategy="expert_parallel", possible=True, max_parts=count, even_parts=_divisors(count, min(count, 64)), note=note
    )


def _copies(model: ModelDescription) -> SplitOption:
    note = "whole copies serve more users, not a longer model"
    return SplitOption(strategy="data_parallel", possible=True, max_parts=1 << 16, note=note)


def _divisors(count: int, limit: int) -> tuple[int, ...]:
    return tuple(n for n in range(2, min(count, limit, MAX_EVEN_PARTS) + 1) if count % n == 0)
