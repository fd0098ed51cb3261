"""`ModelDescription` -> what `shardwise describe` shows: totals, groups of equal layers, and one plain document."""

from __future__ import annotations

from typing import Any

from shardwise.model.description import KV_TYPE_BYTES, LayerDescription, ModelDescription
from shardwise.model.splits import split_options
from shardwise.records import Record, plain


class LayerGroup(Record):
    """Layers that cost the same."""

    indices: tuple[int, ...]
    example: LayerDescription

    @property
    def ranges(self) -> str:
        """`0-3, 6, 9`."""
        parts: list[str] = []
        start = previous = self.indices[0]
        for index in (*self.indices[1:], -1):
            if index != previous + 1:
                parts.append(f"{start}" if start == previous else f"{start}-{previous}")
                start = index
            previous = index
        return ", ".join(parts)


def group_layers(model: ModelDescription) -> list[LayerGroup]:
    """Groups in the order of their first layer."""
    groups: dict[tuple[Any, ...], list[LayerDescription]] = {}
    for layer in model.layers:
        by_kind = tuple(sorted(layer.weight_bytes_by_quantization.items()))
        key = (by_kind, layer.flops_per_token, layer.attention_flops_per_position, layer.kv, layer.experts)
        groups.setdefault(key, []).append(layer)
    return [LayerGroup(indices=tuple(m.index for m in members), example=members[0]) for members in groups.values()]


def kv_bytes(model: ModelDescription, context_tokens: int, kv_type: str = "f16") -> float:
    """KV cache and recurrent state of one session at a length; windowed layers stop at their window."""
    total = 0.0
    for layer in model.layers:
        kept = min(context_tokens, layer.kv.window_tokens or context_tokens)
        total += kept * layer.kv.bytes_per_token(kv_type) + layer.kv.state_bytes
    return total


def flops_per_token(model: ModelDescription, position: int = 0) -> float:
    """FLOPs of one token that has `position` tokens before it, head included."""
    total = model.head_flops_per_token
    for layer in model.layers:
        seen = min(position, layer.kv.window_tokens or position)
        total += layer.flops_per_token + layer.attention_flops_per_position * seen
    return total


def active_params(model: ModelDescription) -> float:
    """Weights that one token meets: half of its matrix FLOPs."""
    return flops_per_token(model) / 2


def describe_as_data(model: ModelDescription) -> dict[str, Any]:
    """The document of `describe --json`."""
    template = model.tokenizer.chat_template
    tokenizer = plain(model.tokenizer) | {"chat_template": template is not None}
    return {
        "name": model.name,
        "architecture": model.architecture,
        "source": plain(model.source),
        "quantization": model.quantization,
        "num_layers": model.num_layers,
        "num_params": model.num_params,
        "active_params": active_params(model),
        "weight_bytes": model.weight_bytes,
        "embedding_bytes": sum(t.num_bytes for t in model.embedding),
        "head_bytes": model.head_bytes,
        "unused_bytes": sum(t.num_bytes for t in model.unused),
        "tied_embeddings": model.tied_embeddings,
        "hidden_size": model.hidden_size,
        "num_heads": model.num_heads,
        "vocab_size": model.vocab_size,
        "context_length": model.context_length,
        "flops_per_token": flops_per_token(model),
        "head_flops_per_token": model.head_flops_per_token,
        "kv_bytes_per_token": {kind: model.kv_bytes_per_token(kv_type=kind) for kind in KV_TYPE_BYTES},
        "kv_bytes_full_context": {kind: kv_bytes(model, model.context_length, kind) for kind in KV_TYPE_BYTES},
        "tokenizer": tokenizer,
        "revision_digest": model.revision_digest,
        "layers": [_layer(layer) for layer in model.layers],
        "splits": [plain(option) for option in split_options(model)],
    }


def _layer(layer: LayerDescription) -> dict[str, Any]:
    return {
        "index": layer.index,
        "weight_bytes": layer.weight_bytes,
        "active_weight_bytes": layer.active_weight_bytes(),
        "bytes_by_quantization": layer.weight_bytes_by_quantization,
        "flops_per_token": layer.flops_per_token,
        "attention_flops_per_position": layer.attention_flops_per_position,
        "kv": plain(layer.kv),
        "kv_bytes_per_token": {kind: layer.kv.bytes_per_token(kind) for kind in KV_TYPE_BYTES},
        "experts": plain(layer.experts),
        "tensors": [
            {"name": t.name, "shape": t.shape, "quantization": t.quantization, "num_bytes": t.num_bytes} for t in layer.tensors
        ],
    }
