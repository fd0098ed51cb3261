"""Layers that are not grouped-query attention with a feed-forward network: latent attention, recurrent states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.tiny_models.spec import Spec, Tensor


@dataclass(frozen=True)
class LatentSpec(Spec):
    """DeepSeek's multi-head latent attention; `q_rank` 0 is the lite form, `split_kv_b` False the old file format."""

    q_rank: int = 64
    kv_rank: int = 64
    rope_dim: int = 32
    nope_dim: int = 32
    v_dim: int = 32
    split_kv_b: bool = True

    def metadata(self) -> dict[str, Any]:
        out = super().metadata()
        k_dim = self.nope_dim + self.rope_dim
        out |= {"attention.kv_lora_rank": self.kv_rank, "rope.dimension_count": self.rope_dim}
        if self.q_rank:
            out["attention.q_lora_rank"] = self.q_rank
        if self.split_kv_b:
            out |= {
                "attention.head_count_kv": 1,
                "attention.key_length": self.kv_rank + self.rope_dim,
                "attention.value_length": self.kv_rank,
                "attention.key_length_mla": k_dim,
                "attention.value_length_mla": self.v_dim,
            }
        else:
            out |= {
                "attention.head_count_kv": self.heads,
                "attention.key_length": k_dim,
                "attention.value_length": self.v_dim,
            }
        return out

    def _attention(self, index: int) -> Iterator[Tensor]:
        k_dim = self.nope_dim + self.rope_dim
        if self.q_rank:
            yield "attn_q_a.weight", (self.embd, self.q_rank)
            yield "attn_q_a_norm.weight", (self.q_rank,)
            yield "attn_q_b.weight", (self.q_rank, self.heads * k_dim)
        else:
            yield "attn_q.weight", (self.embd, self.heads * k_dim)
        yield "attn_kv_a_mqa.weight", (self.embd, self.kv_rank + self.rope_dim)
        yield "attn_kv_a_norm.weight", (self.kv_rank,)
        if self.split_kv_b:
            yield "attn_k_b.weight", (self.nope_dim, self.kv_rank, self.heads)
            yield "attn_v_b.weight", (self.kv_rank, self.v_dim, self.heads)
        else:
            yield "attn_kv_b.weight", (self.kv_rank, self.heads * (self.nope_dim + self.v_dim))
        yield "attn_output.weight", (self.heads * self.v_dim, self.embd)


@dataclass(frozen=True)
class DeltaNetSpec(Spec):
    """Qwen3-Next and Qwen3.5: gated delta nets, and attention with an output gate in every `interval`-th layer."""

    interval: int = 4
    state: int = 32
    key_heads: int = 2
    value_heads: int = 4
    joint_beta_alpha: bool = False

    def metadata(self) -> dict[str, Any]:
        return {
            "full_attention_interval": self.interval,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": self.state * self.value_heads,
            "ssm.state_size": self.state,
            "ssm.time_step_rank": self.value_heads,
            "ssm.group_count": self.key_heads,
        } | super().metadata()

    def _attention(self, index: int) -> Iterator[Tensor]:
        if (index + 1) % self.interval == 0:
            yield "attn_q.weight", (self.embd, 2 * self.q_dim)
            yield "attn_k.weight", (self.embd, self.kv_dim)
            yield "attn_v.weight", (self.embd, self.kv_dim)
            yield "attn_output.weight", (self.q_dim, self.embd)
            yield "attn_q_norm.weight", (self.head_dim,)
            yield "attn_k_norm.weight", (self.head_dim,)
            return
        values, keys = self.state * self.value_heads, self.state * self.key_heads
        yield "attn_qkv.weight", (self.embd, 2 * keys + values)
        yield "attn_gate.weight", (self.embd, values)
        yield "ssm_conv1d.weight", (4, 2 * keys + values)
        yield "ssm_dt.bias", (self.value_heads,)
        yield "ssm_a", (self.value_heads,)
        if self.joint_beta_alpha:
            yield "ssm_ba.weight", (self.embd, 2 * self.value_heads)
        else:
            yield "ssm_beta.weight", (self.embd, self.value_heads)
            yield "ssm_alpha.weight", (self.embd, self.value_heads)
        yield "ssm_norm.weight", (self.state,)
        yield "ssm_out.weight", (values, self.embd)


@dataclass(frozen=True)
class ByLayerSpec(Spec):
    """Attention where `kv_heads_by_layer` is not 0, something recurrent elsewhere."""

    kv_heads_by_layer: tuple[int, ...] = (0, 2, 0, 0, 2, 0)

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {"attention.head_count_kv": list(self.kv_heads_by_layer)}

    def _attention(self, index: int) -> Iterator[Tensor]:
        if self.kv_heads_by_layer[index]:
            yield from super()._attention(index)
        else:
            yield from self._recurrent()

    def _recurrent(self) -> Iterator[Tensor]:
        raise NotImplementedError


@dataclass(frozen=True)
class ShortConvSpec(ByLayerSpec):
    """LFM2: short convolutions."""

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {"shortconv.l_cache": 3}

    def tensors(self, vocab_size: int) -> Iterator[Tensor]:
        """The final norm is called `token_embd_norm`."""
        for name, shape in super().tensors(vocab_size):
            yield name.replace("output_norm", "token_embd_norm"), shape

    def _recurrent(self) -> Iterator[Tensor]:
        yield "shortconv.conv.weight", (3, self.embd)
        yield "shortconv.in_proj.weight", (self.embd, 3 * self.embd)
        yield "shortconv.out_proj.weight", (self.embd, self.embd)


@dataclass(frozen=True)
class MambaSpec(ByLayerSpec):
    """Granite 4: Mamba 2 mixers."""

    state: int = 16
    ssm_heads: int = 8

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 2 * self.embd,
            "ssm.state_size": self.state,
            "ssm.time_step_rank": self.ssm_heads,
            "ssm.group_count": 1,
        }

    def _recurrent(self) -> Iterator[Tensor]:
        inner = 2 * self.embd
        yield "ssm_in.weight", (self.embd, 2 * inner + 2 * self.state + self.ssm_heads)
        yield "ssm_conv1d.weight", (4, inner + 2 * self.state)
        yield "ssm_conv1d.bias", (inner + 2 * self.state,)
        yield "ssm_dt.bias", (self.ssm_heads,)
        yield "ssm_a", (1, self.ssm_heads)
        yield "ssm_d", (1, self.ssm_heads)
        yield "ssm_norm.weight", (inner, 1)
        yield "ssm_out.weight", (inner, self.embd)


@dataclass(frozen=True)
class PureMambaSpec(MambaSpec):
    """Mamba 2: mixers and nothing else."""

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {
            "attention.head_count": 0,
            "attention.head_count_kv": 0,
            "feed_forward_length": 0,
        }

    def _layer(self, index: int) -> Iterator[Tensor]:
        yield "attn_norm.weight", (self.embd,)
        yield from self._recurrent()


@dataclass(frozen=True)
class ParallelMambaSpec(MambaSpec):
    """Falcon-H1: attention and a mixer side by side in every layer."""

    kv_heads_by_layer: tuple[int, ...] = (2, 2, 2, 2)

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {"attention.head_count_kv": 2}

    def _layer(self, index: int) -> Iterator[Tensor]:
        """This final norm of the mixer has no `.weight`, nor has the norm before the network."""
        yield from self._recurrent()
        for name, shape in super()._layer(index):
            yield name.replace("ffn_norm.weight", "ffn_norm"), shape


@dataclass(frozen=True)
class OnePartSpec(MambaSpec):
    """Nemotron-H: each layer is a mixer, or attention, or a feed-forward network."""

    kv_heads_by_layer: tuple[int, ...] = (0, 2, 0, 0, 2, 0)
    ff_by_layer: tuple[int, ...] = (0, 0, 512, 0, 0, 512)

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {"feed_forward_length": list(self.ff_by_layer), "attention.layer_norm_epsilon": 1e-5}

    def _layer(self, index: int) -> Iterator[Tensor]:
        yield "attn_norm.weight", (self.embd,)
        if not self.ff_by_layer[index]:
            yield from self._attention(index)
        elif not self.experts:
            yield from self._dense()
        else:
            for name, shape in (*self._experts(), *self.extra_expert):
                if "gate_exps" not in name and "gate_shexp" not in name:
                    yield name, shape


@dataclass(frozen=True)
class Gemma4Spec(Spec):
    """Gemma 4: wide heads with as many KV heads as in the list in full layers, narrow ones in windowed layers."""

    windows: tuple[bool, ...] = (True, True, False, True, False)
    kv_heads: tuple[int, ...] = (2, 2, 1, 2, 1)
    full_head_dim: int = 128

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {
            "attention.head_count_kv": list(self.kv_heads),
            "attention.sliding_window_pattern": list(self.windows),
            "attention.key_length": self.full_head_dim,
            "attention.value_length": self.full_head_dim,
            "attention.key_length_swa": self.head_dim,
            "attention.value_length_swa": self.head_dim,
            "rope.dimension_count": self.full_head_dim,
            "rope.dimension_count_swa": self.head_dim,
            "embedding_length_per_layer_input": 0,
        }

    def _attention(self, index: int) -> Iterator[Tensor]:
        width = self.head_dim if self.windows[index] else self.full_head_dim
        yield "attn_q.weight", (self.embd, self.heads * width)
        yield "attn_k.weight", (self.embd, self.kv_heads[index] * width)
        if self.windows[index]:
            yield "attn_v.weight", (self.embd, self.kv_heads[index] * width)
        yield "attn_output.weight", (self.heads * width, self.embd)
        yield "attn_q_norm.weight", (width,)
        yield "attn_k_norm.weight", (width,)
        yield "layer_output_scale.weight", (1,)

    def _layer(self, index: int) -> Iterator[Tensor]:
        """With experts, the dense network stays beside them."""
        yield from super()._layer(index)
        if self.experts:
            yield "ffn_gate_inp.weight", (self.embd, self.experts)
            yield "ffn_gate_inp.scale", (self.embd,)
            yield "pre_ffw_norm_2.weight", (self.embd,)
            yield "post_ffw_norm_1.weight", (self.embd,)
            yield "post_ffw_norm_2.weight", (self.embd,)
            yield "ffn_gate_up_exps.weight", (self.embd, 2 * self.expert_ff, self.experts)
            yield "ffn_down_exps.weight", (self.expert_ff, self.embd, self.experts)
