"""A Hugging Face config.json -> what each layer keeps of a token, experts, and GGUF's name of the architecture.

One vocabulary for the many spellings of the same facts. Fails when: a fact that is needed is missing or impossible
(`MalformedModelError`).
"""

from __future__ import annotations

from typing import Any

from shardwise.errors import MalformedModelError
from shardwise.model.description import KvCost
from shardwise.model.layer_cost import AttentionSpec

_SPELLINGS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "context": ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "n_ctx"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "active": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k"),
    "shared": ("n_shared_experts", "num_shared_experts"),
}
_ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "gpt_neox": "gptneox",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "kimi_k2": "deepseek2",
    "glm4_moe": "glm4moe",
    "granitemoe": "granitemoe",
    "llama4_text": "llama4",
    "cohere": "command-r",
    "phi": "phi2",
    "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon",
}
_DEFAULT_CONTEXT = 2048  # BLOOM and Falcon name none


class HfConfig:
    """Facts of one config.json; of a multimodal model, its language part."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        inner = raw.get("text_config")
        self.raw: dict[str, Any] = raw | inner if isinstance(inner, dict) else raw
        self.where = where
        kind = self.raw.get("model_type")
        self.model_type = kind if isinstance(kind, str) else ""
        self.architecture = _ARCHITECTURES.get(self.model_type, self.model_type or "unknown")
        self.num_layers = self.number("layers")
        self.hidden = self.number("hidden")
        self.heads = self.number("heads", 0)
        self.experts = self.number("experts", 0)

    def number(self, fact: str, default: int | None = None) -> int:
        """A count by any of its spellings."""
        names = _SPELLINGS.get(fact, (fact,))
        for name in names:
            value = self.raw.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 40:
                raise MalformedModelError(f"'{name}' is {str(value)[:40]!r}, which is no possible size", where=self.where)
            return value
        if default is None:
            raise MalformedModelError(f"the key '{names[0]}' is missing", where=self.where)
        return default

    @property
    def context(self) -> int:
        return self.number("context", _DEFAULT_CONTEXT)

    @property
    def kv_heads(self) -> int:
        """Falcon's early files say `multi_query` instead of a number."""
        default = self.heads
        if self.raw.get("multi_query") is True and self.raw.get("new_decoder_architecture") is not True:
            return 1
        return self.number("kv_heads", default)

    def token_id(self, which: str) -> int | None:
        value = self.raw.get(f"{which}_token_id")
        value = value[0] if isinstance(value, list) and value else value
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32 else None

    def layer_type(self, index: int) -> str:
        """`full_attention`, `sliding_attention`, `linear_attention` ... where the config lists them, else ''."""
        types = self.raw.get("layer_types")
        if isinstance(types, list) and index < len(types) and isinstance(types[index], str):
            return str(types[index])
        interval = self.raw.get("full_attention_interval")
        if isinstance(interval, int) and interval > 0:
            return "full_attention" if (index + 1) % interval == 0 else "linear_attention"
        return ""

    def window(self, index: int) -> int | None:
        """Sliding window of a layer."""
        size = self.raw.get("sliding_window") or self.raw.get("attention_chunk_size")
        if not isinstance(size, int) or size <= 0 or self.raw.get("use_sliding_window") is False:
            return None
        kind = self.layer_type(index)
        if kind:
            return size if kind in ("sliding_attention", "chunked_attention") else None
        period = self.raw.get("sliding_window_pattern") or {"gemma2": 2, "cohere2": 4}.get(self.model_type, 0)
        if isinstance(period, int) and period > 0:
            return size if (index + 1) % period else None
        return None if index < self.number("max_window_layers", 0) else size

    def attention(self, index: int, names: set[str]) -> AttentionSpec:
        """`names` are the layer's tensors; a layer without key projection keeps no tokens."""
        if self.layer_type(index) in ("linear_attention", "mamba", "conv", "recurrent"):
            kv = KvCost(num_kv_heads=0, key_dim=0, value_dim=0, state_bytes=self._state_bytes())
            return AttentionSpec(num_heads=0, key_dim=0, value_dim=0, kv=kv)
        if self.heads == 0 or not any(_makes_keys(name) for name in names):
            kv = KvCost(num_kv_heads=0, key_dim=0, value_dim=0)
            return AttentionSpec(num_heads=0, key_dim=0, value_dim=0, kv=kv)
        latent = self.number("kv_lora_rank", 0)
        if latent:
            key_dim = latent + self.number("qk_rope_head_dim", 0)
            kv = KvCost(num_kv_heads=1, key_dim=key_dim, value_dim=0)
            return AttentionSpec(num_heads=self.heads, key_dim=key_dim, value_dim=latent, kv=kv)
        size = self.number("head_dim", 0) or self.number("kv_channels", 0) or self.hidden // self.heads
        kv = KvCost(num_kv_heads=self.kv_heads, key_dim=size, value_dim=size, window_tokens=self.window(index))
        return AttentionSpec(num_heads=self.heads, key_dim=size, value_dim=size, kv=kv)

    def _state_bytes(self) -> int:
        """Gated delta net (Qwen3-Next): convolution of keys, keys and values, and one matrix a value head; f32."""
        key_dim, value_dim = self.number("linear_key_head_dim", 0), self.number("linear_value_head_dim", 0)
        values = self.number("linear_num_value_heads", 0)
        channels = 2 * self.number("linear_num_key_heads", 0) * key_dim + values * value_dim
        return 4 * (max(self.number("linear_conv_kernel_dim", 0) - 1, 0) * channels + values * key_dim * value_dim)

    @property
    def quantization(self) -> str:
        """The label of a quantized checkpoint, '' where there is none."""
        config = self.raw.get("quantization_config")
        if not isinstance(config, dict):
            return ""
        method = str(config.get("quant_method", "")).lower()
        if "bitsandbytes" in method:
            return "NF4" if config.get("load_in_4bit") else "INT8"
        if method in ("gptq", "awq", "compressed-tensors", "auto-round"):
            return {8: "INT8", 4: "INT4"}.get(self.packed_bits, method.upper())
        return method.upper()

    @property
    def packed_bits(self) -> int:
        """Bits of a weight in files that pack several into one integer."""
        config = self.raw.get("quantization_config")
        bits = config.get("bits", config.get("w_bit", 4)) if isinstance(config, dict) else 4
        return bits if isinstance(bits, int) and bits in (2, 3, 4, 8) else 4


def _makes_keys(name: str) -> bool:
    parts = ("k_proj", "key_value", "kv_a_proj", "qkv", "c_attn", "Wqkv", "W_pack", "kv_b_proj", "wkv")
    return any(part in name for part in parts)
