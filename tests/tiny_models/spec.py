"""What distinguishes one tiny model from another, and the tensors that follow from it.

Shapes are ggml's (fastest dimension first): a linear layer from `a` to `b` features is `(a, b)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Tensor = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Spec:
    """A model family in miniature. Names follow llama.cpp's."""

    architecture: str
    num_layers: int = 4
    embd: int = 256
    ff: int = 512
    heads: int = 4
    heads_kv: int = 2
    head_dim: int = 64
    rms_norm: bool = True
    norm_bias: bool = False
    final_norm: bool = True
    attn_norm: bool = True
    ffn_norm: bool = True
    post_attn_norm: bool = False
    post_ffn_norm: bool = False
    qkv: str = "split"  # split | fused
    qkv_bias: bool = False
    attn_out_bias: bool = False
    qk_norm: str = ""  # "" | head (one head's dims) | full (all heads together) | heads (a row a head)
    ffn: str = "gated"  # gated | plain | up_gate (one matrix for both) | moe
    ffn_bias: bool = False
    experts: int = 0
    experts_used: int = 0
    expert_ff: int = 256
    shared_expert_ff: int = 0
    shared_expert_gate: bool = False
    leading_dense: int = 0
    dense_every: int = 1  # 2: every second layer has experts, the others are dense
    ffn_width: int = 0  # where the matrices are not as wide as feed_forward_length says
    tied: bool = False
    output_bias: bool = False
    context: int = 512
    keys: dict[str, Any] = field(default_factory=dict)  # without the architecture's prefix
    plain_keys: dict[str, Any] = field(default_factory=dict)  # keys that have no prefix
    extra: tuple[Tensor, ...] = ()  # whole-model tensors
    extra_layer: tuple[Tensor, ...] = ()  # per layer, without "blk.N."
    extra_expert: tuple[Tensor, ...] = ()  # per layer with experts
    nextn_layers: int = 0  # of `num_layers`, at the end: for multi-token prediction, not computed

    @property
    def computed_layers(self) -> int:
        """Layers that can be cut."""
        return self.num_layers - self.nextn_layers

    @property
    def q_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.heads_kv * self.head_dim

    def metadata(self) -> dict[str, Any]:
        """Keys without the architecture's prefix; ints become uint32, floats float32."""
        eps = "attention.layer_norm_rms_epsilon" if self.rms_norm else "attention.layer_norm_epsilon"
        out: dict[str, Any] = {
            "context_length": self.context,
            "embedding_length": self.embd,
            "block_count": self.num_layers,
            "feed_forward_length": self.ff,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.heads_kv,
            "rope.dimension_count": self.head_dim,
            "rope.freq_base": 10000.0,
            eps: 1e-5,
        }
        if self.head_dim * self.heads != self.embd:
            out |= {"attention.key_length": self.head_dim, "attention.value_length": self.head_dim}
        if self.experts:
            out |= {"expert_count": self.experts, "expert_used_count": self.experts_used}
        return out | self.keys

    def tensors(self, vocab_size: int) -> Iterator[Tensor]:
        """Every tensor in the order in which llama.cpp's converter writes them."""
        yield "token_embd.weight", (self.embd, vocab_size)
        yield from self.extra
        for index in range(self.num_layers):
            for name, shape in self._layer(index):
                yield f"blk.{index}.{name}", shape
        if self.final_norm:
            yield from self._norm("output_norm")
        if not self.tied:
            yield "output.weight", (self.embd, vocab_size)
        if self.output_bias:
            yield "output.bias", (vocab_size,)

    def _norm(self, name: str) -> Iterator[Tensor]:
        yield f"{name}.weight", (self.embd,)
        if self.norm_bias:
            yield f"{name}.bias", (self.embd,)

    def _layer(self, index: int) -> Iterator[Tensor]:
        if self.attn_norm:
            yield from self._norm("attn_norm")
        yield from self._attention(index)
        if self.post_attn_norm:
            yield "post_attention_norm.weight", (self.embd,)
        if self.ffn_norm:
            yield from self._norm("ffn_norm")
        sparse = self.ffn == "moe" and index >= self.leading_dense and (index + 1) % self.dense_every == 0
        yield from self._experts() if sparse else self._dense()
        if self.post_ffn_norm:
            yield "post_ffw_norm.weight", (self.embd,)
        yield from self.extra_layer
        if sparse:
            yield from self.extra_expert
        if index >= self.num_layers - self.nextn_layers:
            yield "nextn.eh_proj.weight", (2 * self.embd, self.embd)
            yield "nextn.enorm.weight", (self.embd,)
            yield "nextn.hnorm.weight", (self.embd,)

    def _attention(self, index: int) -> Iterator[Tensor]:
        parts = {"attn_q": self.q_dim, "attn_k": self.kv_dim, "attn_v": self.kv_dim}
        if self.qkv == "fused":
            parts = {"attn_qkv": self.q_dim + 2 * self.kv_dim}
        if self.qkv != "none":
            for name, size in parts.items():
                yield f"{name}.weight", (self.embd, size)
                if self.qkv_bias:
                    yield f"{name}.bias", (size,)
            yield "attn_output.weight", (self.q_dim, self.embd)
            if self.attn_out_bias:
                yield "attn_output.bias", (self.embd,)
        for name, heads in (("attn_q_norm", self.heads), ("attn_k_norm", self.heads_kv)):
            shapes = {"head": (self.head_dim,), "full": (heads * self.head_dim,), "heads": (self.head_dim, heads)}
            if self.qk_norm:
                yield f"{name}.weight", shapes[self.qk_norm]

    def _dense(self) -> Iterator[Tensor]:
        inner = self.ffn_width or self.ff
        names = {"ffn_up": (self.embd, 2 * inner if self.ffn == "up_gate" else inner), "ffn_down": (inner, self.embd)}
        if self.ffn in ("gated", "moe"):
            names = {"ffn_gate": (self.embd, inner)} | names
        for name, shape in names.items():
            yield f"{name}.weight", shape
            if self.ffn_bias:
                yield f"{name}.bias", (shape[1],)

    def _experts(self) -> Iterator[Tensor]:
        yield "ffn_gate_inp.weight", (self.embd, self.experts)
        sizes = {"gate": (self.embd, self.expert_ff), "up": (self.embd, self.expert_ff), "down": (self.expert_ff, self.embd)}
        for name, shape in sizes.items():
            yield f"ffn_{name}_exps.weight", (*shape, self.experts)
            if self.ffn_bias:
                yield f"ffn_{name}_exps.bias", (shape[1], self.experts)
        if self.ffn_bias:
            yield "ffn_gate_inp.bias", (self.experts,)
        if self.shared_expert_ff:
            shared = {"gate": (self.embd, self.shared_expert_ff), "down": (self.shared_expert_ff, self.embd)}
            for name, shape in (shared | {"up": shared["gate"]}).items():
                yield f"ffn_{name}_shexp.weight", shape
        if self.shared_expert_gate:
            yield "ffn_gate_inp_shexp.weight", (self.embd,)
