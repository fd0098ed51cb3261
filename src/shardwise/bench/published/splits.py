"""How a row's program lays layers over its devices: shares of the model, in order. Nothing fails."""

from __future__ import annotations

from shardwise.bench.published.case import Case
from shardwise.bench.published.steps import Tier, layer_bytes


def shares(case: Case, parts: list[list[Tier]]) -> list[float]:
    """Share of the layers on each device.

    Stated ranges win. prima.cpp's Halda fills the fastest memory first (arXiv 2504.08791); exo and llama.cpp go by memory;
    what has no memory figure is equal.
    """
    if len(case.row.layers) == len(case.devices):
        return [(end - start) / case.model.num_layers for start, end in case.row.layers]
    if "prima" in case.framework.name and "without halda" not in case.row.strategy:
        return _fastest_first(case, parts)
    weights = [device.vram_bytes for device in case.devices]
    if case.framework.name == "exo" or "without halda" in case.row.strategy:
        weights = [device.machines.memory_bytes or device.vram_bytes for device in case.devices]
        weights = [w + (d.machines.vram_bytes or 0.0) for w, d in zip(weights, case.devices)]
    total = sum(weights)
    return [w / total for w in weights] if total else [1 / len(weights)] * len(weights)


def _fastest_first(case: Case, parts: list[list[Tier]]) -> list[float]:
    total = layer_bytes(case.model)
    alone = [i for i, tiers in enumerate(parts) if tiers[0].capacity_bytes >= total]
    if alone and "every device" not in case.row.strategy:  # one device is faster than any hop
        best = max(alone, key=lambda i: _rate(parts[i][0]))
        return [1.0 if i == best else 0.0 for i in range(len(parts))]
    places = [(tier, index) for index, tiers in enumerate(parts) for tier in tiers]
    places.sort(key=lambda place: -_rate(place[0]))
    held, left = [0.0] * len(parts), total
    for tier, index in places:
        here = min(left, tier.capacity_bytes)
        held[index] += here
        left -= here
    if left > 0:  # the rest goes where the most memory is
        biggest = max(range(len(parts)), key=lambda i: sum(t.capacity_bytes for t in parts[i]))
        held[biggest] += left
    return [h / total for h in held]


def _rate(tier: Tier) -> float:
    return max(t.weight_bytes_per_s.value for t in tier.profile.rates)
