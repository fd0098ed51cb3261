"""Any `torch.nn.Module` -> `ModelDescription`, without importing torch: its state dict is asked for names, shapes and dtypes.

The layers are the children of the `ModuleList` (or `Sequential`) that holds the most weights; what is registered
before it is the input side, what comes after is the output side. A module without such a list is one layer. Facts of
attention come from `module.config` where it is a Hugging Face config; without it no KV cache is assumed. A weight that
is used twice (tied) counts once. FLOPs count each matrix once a token, so convolutions are underestimated.
Fails when: the module has no parameters (`ModelError`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import MalformedModelError, ModelError
from shardwise.model.description import KvCost, ModelDescription, ModelSource, TokenizerDescription, WeightTensor
from shardwise.model.hf_config import HfConfig
from shardwise.model.layer_cost import AttentionSpec, build_layer, dominant_quantization

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_STACKS = ("ModuleList", "Sequential")
_NO_ATTENTION = AttentionSpec(num_heads=0, key_dim=0, value_dim=0, kv=KvCost(num_kv_heads=0, key_dim=0, value_dim=0))


@dataclass
class _Parts:
    """Parameters by who holds them."""

    layers: list[list[WeightTensor]]
    embedding: list[WeightTensor] = field(default_factory=list)
    output: list[WeightTensor] = field(default_factory=list)
    tied: bool = False


def describe_module(module: Any) -> ModelDescription:
    """Describe a live module (also one on the meta device)."""
    stack, count = _layer_stack(module)
    parts = _sort_parameters(module, stack, count)
    everything = [*parts.embedding, *parts.output, *(t for ts in parts.layers for t in ts)]
    if not everything:
        raise ModelError("this module has no parameters", where=type(module).__name__)
    config = _config(module)
    return ModelDescription(
        name=type(module).__name__,
        architecture=config.architecture if config else type(module).__name__,
        source=ModelSource(kind="module", reference=type(module).__name__),
        layers=tuple(
            build_layer(
                index,
                tuple(tensors),
                config.attention(index, {t.name for t in tensors}) if config else _NO_ATTENTION,
                num_experts=config.experts if config else 0,
                num_active=config.number("active", 0) if config else 0,
                num_shared=config.number("shared", 0) if config else 0,
            )
            for index, tensors in enumerate(parts.layers)
        ),
        embedding=tuple(parts.embedding),
        output=tuple(parts.output),
        tied_embeddings=parts.tied,
        hidden_size=config.hidden if config else _hidden_size(parts),
        num_heads=config.heads if config else 0,
        vocab_size=config.number("vocab_size", 0) if config else 0,
        context_length=config.context if config else 0,
        tokenizer=TokenizerDescription(kind="", vocab_size=config.number("vocab_size", 0) if config else 0, digest=""),
        quantization=dominant_quantization(everything),
        revision_digest=_digest(module),
    )


def _layer_stack(module: Any) -> tuple[str, int]:
    """(name, length) of the list that holds most weights; ('', 0) where there is none of two or more like children."""
    best, best_size = ("", 0), 0
    for name, child in module.named_modules():
        if type(child).__name__ not in _STACKS:
            continue
        children = list(child.children())
        if len(children) < 2 or len({type(c).__name__ for c in children}) > max(2, len(children) // 4):
            continue
        size = sum(p.numel() for p in child.parameters())
        if size > best_size:
            best, best_size = (name, len(children)), size
    return best


def _sort_parameters(module: Any, stack: str, count: int) -> _Parts:
    """Walk all parameters in order of registration; one seen before is tied and not counted again."""
    parts = _Parts([[] for _ in range(max(count, 1))])
    prefix = f"{stack}." if stack else ""
    embeddings = {name for name, child in module.named_modules() if type(child).__name__.endswith("Embedding")}
    seen: set[int] = set()
    inside_or_after = False
    for name, parameter in _tensors(module):
        owner = name.rpartition(".")[0]
        if id(parameter) in seen:
            parts.tied = parts.tied or not (prefix and name.startswith(prefix))
            continue
        seen.add(id(parameter))
        weight = _weight(name, parameter)
        if not count:
            parts.layers[0].append(weight)
        elif name.startswith(prefix):
            inside_or_after = True
            parts.layers[_child_index(name[len(prefix) :])].append(weight)
        elif owner in embeddings or not inside_or_after:
            parts.embedding.append(weight)
        else:
            parts.output.append(weight)
    return parts


def _tensors(module: Any) -> list[tuple[str, Any]]:
    """Parameters and saved buffers, tied ones under each of their names."""
    return [(name, value) for name, value in module.state_dict(keep_vars=True).items() if hasattr(value, "element_size")]


def _child_index(rest: str) -> int:
    head = rest.split(".", 1)[0]
    return int(head) if head.isdigit() else 0


def _weight(name: str, parameter: Any) -> WeightTensor:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return WeightTensor(
        name=name,
        shape=tuple(int(size) for size in parameter.shape),
        quantization=_DTYPES.get(dtype, dtype.upper()),
        num_bytes=int(parameter.numel()) * int(parameter.element_size()),
    )


def _config(module: Any) -> HfConfig | None:
    """The module's config where it has the keys of a language model."""
    config = getattr(module, "config", None)
    raw = config.to_dict() if config is not None and hasattr(config, "to_dict") else config
    if not isinstance(raw, dict):
        return None
    try:
        return HfConfig(raw, type(module).__name__)
    except MalformedModelError:  # the config of something else, such as a diffusion model
        return None


def _hidden_size(parts: _Parts) -> int:
    """The smaller side of the first matrix of the first layer."""
    matrices = [t for t in parts.layers[0] if len(t.shape) == 2]
    return min(matrices[0].shape) if matrices else 0


def _digest(module: Any) -> str:
    """Names, shapes, dtypes, and 16 values of each parameter that has values."""
    digest = hashlib.sha256(b"shardwise module 1")
    for name, parameter in _tensors(module):
        digest.update(f"{name}\0{tuple(parameter.shape)}\0{parameter.dtype}\0".encode())
        if str(parameter.device) != "meta" and parameter.numel():
            flat = parameter.detach().reshape(-1)
            step = max(int(parameter.numel()) // 16, 1)
            digest.update(repr(flat[::step][:16].float().tolist()).encode())
    return digest.hexdigest()
