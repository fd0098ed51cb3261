"""Tensors and attention facts of one layer -> what it costs. Shared by every reader and by the presets.

FLOPs: a matrix product costs 2 per multiply-add, so a token costs twice the elements of every matrix that it meets
(Kaplan et al., arXiv 2001.08361, section 2.1); of a mixture of experts it meets `num_active / num_experts`.
Attention scores and the weighted sum add `2 * heads * (key_dim + value_dim)` for every position that is attended.
Nothing here fails.
"""

from __future__ import annotations

import math
import re

from shardwise.model.description import ExpertSpec, KvCost, LayerDescription, WeightTensor
from shardwise.records import Record

# GGUF: ffn_up_exps (all experts in one tensor), ffn_up.3 (old: one tensor an expert), ffn_up_shexp (shared).
# Hugging Face: mlp.experts.3.up_proj, mlp.experts.gate_up_proj, mlp.shared_expert(s).up_proj.
_EXPERT = re.compile(r"_exps\b|\bffn_(?:gate|up|down)\.\d+\.|\bexperts\.")
_SHARED = re.compile(r"_shexp\b|\bshared_experts?\.")
_NO_MATRIX = re.compile(r"\.bias$|_bias$|norm|rope_|position_embd|_scales?$|scale_inv$|\.g_idx$|\.qzeros$")


class AttentionSpec(Record):
    """How one layer mixes positions. A layer without attention has `num_heads` 0 and an empty `KvCost`."""

    num_heads: int
    key_dim: int  # per head, as computed (with an MLA cache: latent + rope)
    value_dim: int
    kv: KvCost

    @property
    def flops_per_position(self) -> float:
        return 2.0 * self.num_heads * (self.key_dim + self.value_dim)


def is_expert(name: str) -> bool:
    """Is this a weight of routed experts?"""
    return _EXPERT.search(name) is not None and not is_shared_expert(name)


def is_shared_expert(name: str) -> bool:
    """Is this a weight of experts that every token meets?"""
    return _SHARED.search(name) is not None


def is_matrix(tensor: WeightTensor) -> bool:
    """Does a token meet this tensor in a matrix product?"""
    return len(tensor.shape) >= 2 and _NO_MATRIX.search(tensor.name) is None


def build_layer(
    index: int,
    tensors: tuple[WeightTensor, ...],
    attention: AttentionSpec,
    *,
    num_experts: int = 0,
    num_active: int = 0,
    num_shared: int = 0,
    logical_elements: dict[str, int] | None = None,
) -> LayerDescription:
    """One layer with its costs. `logical_elements` gives the weights behind tensors that pack several into one value."""
    routed = [t for t in tensors if is_expert(t.name)]
    share = num_active / num_experts if num_experts and routed else 1.0
    flops = 0.0
    for tensor in tensors:
        if is_matrix(tensor):
            elements = (logical_elements or {}).get(tensor.name, tensor.num_elements)
            flops += 2.0 * elements * (share if is_expert(tensor.name) else 1.0)
    return LayerDescription(
        index=index,
        tensors=tensors,
        flops_per_token=flops,
        attention_flops_per_position=attention.flops_per_position,
        kv=attention.kv,
        experts=_expert_spec(tensors, routed, num_experts, num_active, num_shared),
    )


def _expert_spec(
    tensors: tuple[WeightTensor, ...], routed: list[WeightTensor], num_experts: int, num_active: int, num_shared: int
) -> ExpertSpec | None:
    if not routed or num_experts < 1:
        return None
    shared_bytes = sum(t.num_bytes for t in tensors if is_shared_expert(t.name))
    return ExpertSpec(
        num_experts=num_experts,
        num_active=min(max(num_active, 1), num_experts),
        expert_bytes=sum(t.num_bytes for t in routed) // num_experts,
        num_shared=max(num_shared, 1) if shared_bytes else 0,
        shared_bytes=shared_bytes,
    )


def dominant_quantization(tensors: list[WeightTensor]) -> str:
    """The format that holds most of the matrices' elements: the label where a file names none."""
    totals: dict[str, int] = {}
    for tensor in tensors:
        if len(tensor.shape) >= 2:
            totals[tensor.quantization] = totals.get(tensor.quantization, 0) + math.prod(tensor.shape)
    return max(totals, key=lambda name: totals[name], default="F32")
