"""Seconds of compute: one layer, one stage, for any step (decode rows of several users, or a chunk of a prompt).

In: model, device, the shape of a step. Out: seconds. Roofline (Williams, Waterman, Patterson 2009): a layer takes
`fixed + max(flops / compute, (weights touched + KV read) / bandwidth)`, per quantization, because rates differ by
quantization (ADR 0002). Nothing here fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from shardwise.machines.profile import DeviceProfile
from shardwise.model.description import LayerDescription, ModelDescription, WeightTensor
from shardwise.planner.cost_memory import KV_PADDING_TOKENS
from shardwise.planner.cost_rates import EffectiveRates, RuntimeCosts, kv_bytes_per_s, rates_for, timed_head, timed_layer_s


@dataclass(frozen=True, slots=True)
class StepShape:
    """What one step asks of a layer."""

    rows: float  # tokens in the batch
    sessions: float  # KV caches read
    context_tokens: float  # positions read from each
    pairs: float  # attended (row, position) pairs
    sampled_rows: float  # rows whose logits are wanted

    @staticmethod
    def decode(rows: float, context_tokens: float) -> StepShape:
        """`rows` sessions, one token each."""
        return StepShape(rows, rows, context_tokens, rows * context_tokens, rows)

    @staticmethod
    def verify(rows: float, drafted: int, context_tokens: float) -> StepShape:
        """`rows` sessions, each with `drafted` + 1 tokens to verify."""
        tokens = rows * (drafted + 1)
        return StepShape(tokens, rows, context_tokens, tokens * context_tokens, tokens)

    @staticmethod
    def prefill(tokens: float, position: float, *, last: bool = False) -> StepShape:
        """A chunk of `tokens` prompt tokens that starts at `position`; only the last chunk is sampled."""
        return StepShape(tokens, 1, position + tokens, tokens * (position + (tokens + 1) / 2), 1.0 if last else 0.0)


@dataclass(frozen=True, slots=True)
class _Group:
    """The weights of one quantization in a layer, and the products they cause."""

    quantization: str
    num_bytes: float
    flops_per_token: float


@lru_cache(maxsize=65536)
def _groups(tensors: tuple[WeightTensor, ...], flops_per_token: float) -> tuple[_Group, ...]:
    matrices = [t for t in tensors if len(t.shape) > 1] or list(tensors)
    elements = sum(t.num_elements for t in matrices) or 1
    out: dict[str, _Group] = {}
    for tensor in tensors:
        old = out.get(tensor.quantization, _Group(tensor.quantization, 0.0, 0.0))
        share = tensor.num_elements / elements if tensor in matrices else 0.0
        out[tensor.quantization] = _Group(
            tensor.quantization, old.num_bytes + tensor.num_bytes, old.flops_per_token + share * flops_per_token
        )
    return tuple(out.values())


def _dominant(groups: tuple[_Group, ...], device: DeviceProfile) -> EffectiveRates:
    return rates_for(device, max(groups, key=lambda g: g.num_bytes).quantization)


def layer_signature(layer: LayerDescription) -> tuple[object, ...]:
    """Layers with equal signatures cost the same."""
    sizes = tuple(sorted(layer.weight_bytes_by_quantization.items()))
    return (sizes, layer.flops_per_token, layer.attention_flops_per_position, layer.kv, layer.experts)


def attention_s(layer: LayerDescription, device: DeviceProfile, shape: StepShape, kv_type: str) -> tuple[float, float]:
    """(compute, memory) seconds of reading the KV cache of one layer; a sliding window bounds the positions."""
    window = layer.kv.window_tokens
    context = shape.context_tokens if window is None else min(shape.context_tokens, float(window))
    scale = context / shape.context_tokens if shape.context_tokens else 1.0
    rates = _dominant(_groups(layer.tensors, layer.flops_per_token), device)
    flops_per_s = rates.attention_flops_per_s or rates.flops_per_s
    compute = shape.pairs * scale * layer.attention_flops_per_position / flops_per_s
    read = shape.sessions * (context * layer.kv.bytes_per_token(kv_type) + layer.kv.state_bytes)
    return compute, read / kv_bytes_per_s(device, kv_type)


def layer_s(layer: LayerDescription, device: DeviceProfile, shape: StepShape, kv_type: str = "f16") -> float:
    """Seconds of one layer for one step.

    Measured timings of a real layer are scaled by bytes; otherwise the roofline. A sparse layer touches
    `E * (1 - (1 - k/E)^rows)` experts (each row picks k of E independently; used by Fiddler and Mixtral-offloading).
    """
    groups = _groups(layer.tensors, layer.flops_per_token)
    rates = _dominant(groups, device)
    attention_compute_s, attention_read_s = attention_s(layer, device, shape, kv_type)
    touched = layer.active_weight_bytes(max(1, round(shape.rows))) / max(1, layer.weight_bytes)
    measured_s = timed_layer_s(rates, shape.rows) if layer.experts is None else None
    if measured_s is not None and rates.timing_layer_bytes:
        scaled_s = measured_s * layer.weight_bytes / rates.timing_layer_bytes
        return scaled_s + _attention_beyond_timings_s(layer, device, shape, kv_type)
    compute_s, memory_s = attention_compute_s, attention_read_s
    for group in groups:
        own = rates_for(device, group.quantization)
        compute_s += shape.rows * group.flops_per_token / own.flops_per_s
        memory_s += group.num_bytes * touched / own.weight_bytes_per_s
    return rates.layer_fixed_s + max(compute_s, memory_s) + rates.row_s * max(0.0, shape.rows - 1)


def layer_measured(layer: LayerDescription, device: DeviceProfile) -> bool:
    """Whether `layer_s` scales the timings of a real layer, so that no rate of a single quantization is asked for."""
    rates = _dominant(_groups(layer.tensors, layer.flops_per_token), device)
    return layer.experts is None and bool(rates.timings) and rates.timing_layer_bytes > 0


def _attention_beyond_timings_s(layer: LayerDescription, device: DeviceProfile, shape: StepShape, kv_type: str) -> float:
    """Attention that a layer timed with an empty cache has not in it.

    llama.cpp reads whole blocks of `KV_PADDING_TOKENS` positions, so the first block is in every timing; a decode row
    reads the cache, a prompt's chunk computes (its rows share what is read).
    """
    context = -(-shape.context_tokens // KV_PADDING_TOKENS) * KV_PADDING_TOKENS - KV_PADDING_TOKENS
    beyond = max(0.0, context)
    if shape.rows > shape.sessions:
        earlier = StepShape(shape.rows, shape.sessions, beyond, shape.rows * beyond, shape.sampled_rows)
    else:
        earlier = StepShape(shape.rows, shape.sessions, beyond, 0.0, shape.sampled_rows)
    return max(attention_s(layer, device, earlier, kv_type))


def head_s(model: ModelDescription, device: DeviceProfile, sampled_rows: float) -> float:
    """Seconds of the final norm and the output matrix for `sampled_rows` rows; 0 where nothing is sampled."""
    if sampled_rows <= 0:
        return 0.0
    timed = timed_head(device)
    if timed is not None and (measured_s := timed_layer_s(timed, sampled_rows)) is not None:
        return measured_s * model.head_bytes / max(1, timed.timing_layer_bytes)
    has_matrix = any(len(t.shape) > 1 for t in model.output)
    tensors = model.output if has_matrix else (*model.output, *model.embedding)
    compute_s = memory_s = 0.0
    for group in _groups(tensors, model.head_flops_per_token):
        own = rates_for(device, group.quantization)
        compute_s += sampled_rows * group.flops_per_token / own.flops_per_s
        memory_s += group.num_bytes / own.weight_bytes_per_s
    return max(compute_s, memory_s)


@dataclass(frozen=True, slots=True)
class LayerClasses:
    """The distinct layers of a model and which of them each layer is; most models have one or two."""

    representatives: tuple[LayerDescription, ...]
    class_of: npt.NDArray[np.intp]  # [num_layers]

    @staticmethod
    def of(model: ModelDescription) -> LayerClasses:
        """Group the layers of `model` by what they cost."""
        known: dict[tuple[object, ...], int] = {}
        representatives: list[LayerDescription] = []
        indices = np.empty(model.num_layers, dtype=np.intp)
        for index, layer in enumerate(model.layers):
            key = layer_signature(layer)
            if key not in known:
                known[key] = len(representatives)
                representatives.append(layer)
            indices[index] = known[key]
        return LayerClasses(tuple(representatives), indices)

    def times_s(self, device: DeviceProfile, shape: StepShape, kv_type: str) -> npt.NDArray[np.float64]:
        """Seconds of each layer, [num_layers]."""
        times = np.array([layer_s(layer, device, shape, kv_type) for layer in self.representatives])
        out: npt.NDArray[np.float64] = times[self.class_of]
        return out


def ends_s(model: ModelDescription, device: DeviceProfile, shape: StepShape, costs: RuntimeCosts) -> tuple[float, float]:
    """(what only the first stage does, what only the last one does), seconds of one step."""
    first = shape.rows * costs.embed_row_s
    last = head_s(model, device, shape.sampled_rows) + shape.sampled_rows * costs.sample_row_s
    return first, last


def step_overhead_s(shape: StepShape, costs: RuntimeCosts) -> float:
    """What every stage pays for a step, whatever its layers: Python, ZeroMQ, book-keeping a session."""
    return costs.step_overhead_s + shape.sessions * costs.row_overhead_s
