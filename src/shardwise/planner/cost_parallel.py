"""Seconds of a stage that several ranks share: tensor parallelism with uneven shares, and experts spread over ranks.

In: the layers' times on each rank's device, the links between the ranks. Out: (compute, sync) seconds of one step.
Nothing here fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.machines.profile import DeviceProfile, LinkProfile
from shardwise.model.description import ModelDescription
from shardwise.planner.cost_compute import StepShape, head_s, layer_s
from shardwise.planner.cost_links import all_reduce_s, all_to_all_s
from shardwise.planner.cost_rates import RuntimeCosts, rates_for

SYNC_ELEMENT_BYTES = 4.0  # partial sums are added in f32


def tensor_parallel_s(
    model: ModelDescription,
    layers: tuple[int, int],
    ranks: Sequence[tuple[DeviceProfile, float]],
    links: list[LinkProfile],
    shape: StepShape,
    costs: RuntimeCosts,
    kv_type: str,
) -> tuple[float, float]:
    """Slowest rank and all-reduces of a step; `ranks` = (device, share), `links` = the ring between them.

    A rank computes its share of every matrix; the fixed cost of a layer stays. Two all-reduces a layer (Megatron-LM,
    Shoeybi 2019), one for the head's parts.
    """
    start, end = layers
    whole = end == model.num_layers
    slowest = 0.0
    for device, share in ranks:
        total = head_s(model, device, shape.sampled_rows) * share if whole else 0.0
        for layer in model.layers[start:end]:
            fixed = rates_for(device, max(layer.tensors, key=lambda t: t.num_bytes).quantization).layer_fixed_s
            total += fixed + max(0.0, layer_s(layer, device, shape, kv_type) - fixed) * share
        slowest = max(slowest, total)
    one = all_reduce_s(links, shape.rows * model.hidden_size * SYNC_ELEMENT_BYTES, costs)
    return slowest, one * 2 * (end - start)


def expert_parallel_s(
    model: ModelDescription,
    layers: tuple[int, int],
    ranks: Sequence[tuple[DeviceProfile, tuple[int, int]]],
    links: list[LinkProfile],
    shape: StepShape,
    costs: RuntimeCosts,
    kv_type: str,
) -> tuple[float, float]:
    """Dense part on the first rank, experts on their ranks, two exchanges a sparse layer (GShard, Lepikhin 2021)."""
    start, end = layers
    main = ranks[0][0]
    compute = head_s(model, main, shape.sampled_rows) if end == model.num_layers else 0.0
    sync = 0.0
    for layer in model.layers[start:end]:
        full = layer_s(layer, main, shape, kv_type)
        spec = layer.experts
        if spec is None:
            compute += full
            continue
        active = layer.active_weight_bytes(max(1, round(shape.rows)))
        touched = spec.num_experts * (1.0 - (1.0 - spec.num_active / spec.num_experts) ** shape.rows)
        dense_share = 1.0 - touched * spec.expert_bytes / active
        compute += full * dense_share
        compute += max(
            layer_s(layer, device, shape, kv_type) * (1.0 - dense_share) * (last - first) / spec.num_experts
            for device, (first, last) in ranks
        )
        rows_bytes = shape.rows * min(spec.num_active, len(ranks)) * model.hidden_size * SYNC_ELEMENT_BYTES
        sync += 2 * all_to_all_s(links, rows_bytes, costs)
    return compute, sync
