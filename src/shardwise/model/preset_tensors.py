"""Dimensions of a model -> its tensors and layers, as a GGUF file of it would hold them. Nothing here fails.

Shapes in ggml's order, `(in, out)`. Norms and biases are f32 and make up less than 0.1 %; biases are left out.
"""

from __future__ import annotations

from shardwise.model.description import KvCost, LayerDescription, WeightTensor
from shardwise.model.layer_cost import AttentionSpec, build_layer
from shardwise.model.preset_quantization import MixFacts, tensor_format
from shardwise.model.quantization import quantization, tensor_bytes
from shardwise.records import Record

Shapes = dict[str, tuple[int, ...]]
_CONV_TAPS = 3  # a kernel of 4 keeps 3 positions


class Dimensions(Record):
    """What a config.json says, in one vocabulary. Zero: the model has no such thing."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    context: int
    kv_heads: int = 0  # 0 = as many as heads
    head_dim: int = 0  # 0 = hidden / heads
    tied: bool = False
    ffn_matrices: int = 3  # gated; 2 = plain up and down
    fused_qkv: bool = False
    gated_attention: bool = False  # the query projection also makes a gate of its size
    positions: int = 0  # rows of a learned position embedding
    q_lora: int = 0
    kv_lora: int = 0  # > 0: multi-head latent attention
    nope_dim: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    experts: int = 0
    active: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0  # leading layers without experts
    moe_every: int = 1  # one of so many layers has experts, the last of each group
    window: int = 0
    window_period: int = 0  # one of so many layers sees everything, the last of each group
    attention_period: int = 0  # hybrids: one of so many layers attends, the others keep a state
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_head_dim: int = 0

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def size_per_head(self) -> int:
        return self.head_dim or self.hidden // self.heads

    def is_recurrent(self, index: int) -> bool:
        return self.attention_period > 0 and (index + 1) % self.attention_period != 0

    def has_experts(self, index: int) -> bool:
        return self.experts > 0 and index >= self.dense_layers and (index + 1) % self.moe_every == 0


def layer_shapes(dims: Dimensions, index: int) -> Shapes:
    """Names (without `blk.N.`) and shapes of one layer."""
    if dims.is_recurrent(index):
        mixing = _recurrent_shapes(dims)
    elif dims.kv_lora:
        mixing = _latent_shapes(dims)
    else:
        mixing = _attention_shapes(dims)
    feed_forward = _expert_shapes(dims) if dims.has_experts(index) else _dense_shapes(dims)
    norms: Shapes = {"attn_norm.weight": (dims.hidden,), "ffn_norm.weight": (dims.hidden,)}
    return norms | mixing | feed_forward


def _attention_shapes(dims: Dimensions) -> Shapes:
    query, kv = dims.heads * dims.size_per_head, dims.num_kv_heads * dims.size_per_head
    output: Shapes = {"attn_output.weight": (query, dims.hidden)}
    if dims.fused_qkv:
        return {"attn_qkv.weight": (dims.hidden, query + 2 * kv)} | output
    factor = 2 if dims.gated_attention else 1
    shapes: Shapes = {"attn_q.weight": (dims.hidden, factor * query), "attn_k.weight": (dims.hidden, kv)}
    return shapes | {"attn_v.weight": (dims.hidden, kv)} | output


def _latent_shapes(dims: Dimensions) -> Shapes:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1), with GGUF's absorbed key and value matrices."""
    query = dims.heads * (dims.nope_dim + dims.rope_dim)
    shapes: Shapes = {"attn_q.weight": (dims.hidden, query)}
    if dims.q_lora:
        shapes = {"attn_q_a.weight": (dims.hidden, dims.q_lora), "attn_q_b.weight": (dims.q_lora, query)}
    return shapes | {
        "attn_kv_a_mqa.weight": (dims.hidden, dims.kv_lora + dims.rope_dim),
        "attn_k_b.weight": (dims.nope_dim, dims.kv_lora, dims.heads),
        "attn_v_b.weight": (dims.kv_lora, dims.value_dim, dims.heads),
        "attn_output.weight": (dims.heads * dims.value_dim, dims.hidden),
    }


def _recurrent_shapes(dims: Dimensions) -> Shapes:
    """Gated delta net (qwen3next and qwen35 in llama.cpp)."""
    keys, values = _linear_sizes(dims)
    return {
        "attn_qkv.weight": (dims.hidden, 2 * keys + values),
        "attn_gate.weight": (dims.hidden, values),
        "ssm_ba.weight": (dims.hidden, 2 * dims.linear_value_heads),
        "ssm_out.weight": (values, dims.hidden),
    }


def _linear_sizes(dims: Dimensions) -> tuple[int, int]:
    return dims.linear_key_heads * dims.linear_head_dim, dims.linear_value_heads * dims.linear_head_dim


def _dense_shapes(dims: Dimensions) -> Shapes:
    shapes: Shapes = {"ffn_up.weight": (dims.hidden, dims.ffn), "ffn_down.weight": (dims.ffn, dims.hidden)}
    return shapes | ({"ffn_gate.weight": (dims.hidden, dims.ffn)} if dims.ffn_matrices == 3 else {})


def _expert_shapes(dims: Dimensions) -> Shapes:
    hidden, width, count, shared = dims.hidden, dims.expert_ffn, dims.experts, dims.shared_ffn
    shapes: Shapes = {
        "ffn_gate_inp.weight": (hidden, count),
        "ffn_gate_exps.weight": (hidden, width, count),
        "ffn_up_exps.weight": (hidden, width, count),
        "ffn_down_exps.weight": (width, hidden, count),
    }
    if shared:
        shapes |= {"ffn_gate_shexp.weight": (hidden, shared), "ffn_up_shexp.weight": (hidden, shared)}
        shapes["ffn_down_shexp.weight"] = (shared, hidden)
    return shapes


def attention_spec(dims: Dimensions, index: int) -> AttentionSpec:
    """What layer `index` keeps of each token."""
    if dims.is_recurrent(index):
        keys, values = _linear_sizes(dims)
        state = 4 * (_CONV_TAPS * (2 * keys + values) + dims.linear_head_dim * values)
        empty = KvCost(num_kv_heads=0, key_dim=0, value_dim=0, state_bytes=state)
        return AttentionSpec(num_heads=0, key_dim=0, value_dim=0, kv=empty)
    if dims.kv_lora:
        latent = dims.kv_lora + dims.rope_dim
        kv = KvCost(num_kv_heads=1, key_dim=latent, value_dim=0)
        return AttentionSpec(num_heads=dims.heads, key_dim=latent, value_dim=dims.kv_lora, kv=kv)
    size = dims.size_per_head
    windowed = dims.window > 0 and (index + 1) % max(dims.window_period, 1) != 0
    window = dims.window if windowed else None
    kv = KvCost(num_kv_heads=dims.num_kv_heads, key_dim=size, value_dim=size, window_tokens=window)
    return AttentionSpec(num_heads=dims.heads, key_dim=size, value_dim=size, kv=kv)


class TensorFactory:
    """Shapes -> `WeightTensor`s of one quantization label."""

    def __init__(self, dims: Dimensions, label: str) -> None:
        self.dims = dims
        self.label = label
        self.facts = MixFacts(
            num_layers=dims.layers,
            num_experts=dims.experts,
            kv_groups=dims.heads // dims.num_kv_heads,
            architecture=dims.architecture,
            tied=dims.tied,
        )

    def make(self, prefix: str, name: str, shape: tuple[int, ...], index: int = 0) -> WeightTensor:
        small = len(shape) < 2 or "ffn_gate_inp" in name
        kind = "F32" if small else tensor_format(self.label, name, shape[0], index, self.facts)
        exact = quantization(kind)
        elements = 1
        for size in shape:
            elements *= size
        whole = shape[0] % exact.block_elements == 0
        size = tensor_bytes(shape, exact) if whole else -(-elements * exact.block_bytes // exact.block_elements)
        return WeightTensor(name=prefix + name, shape=shape, quantization=kind, num_bytes=size)

    def layer(self, index: int) -> LayerDescription:
        tensors = [self.make(f"blk.{index}.", name, shape, index) for name, shape in layer_shapes(self.dims, index).items()]
        return build_layer(
            index,
            tuple(tensors),
            attention_spec(self.dims, index),
            num_experts=self.dims.experts if self.dims.has_experts(index) else 0,
            num_active=self.dims.active,
            num_shared=1,
        )

    def embedding(self) -> tuple[WeightTensor, ...]:
        tensors = [self.make("", "token_embd.weight", (self.dims.hidden, self.dims.vocab))]
        if self.dims.positions:
            tensors.append(self.make("", "position_embd.weight", (self.dims.hidden, self.dims.positions)))
        return tuple(tensors)

    def output(self) -> tuple[WeightTensor, ...]:
        norm = self.make("", "output_norm.weight", (self.dims.hidden,))
        if self.dims.tied:
            return (norm,)
        return (norm, self.make("", "output.weight", (self.dims.hidden, self.dims.vocab)))
