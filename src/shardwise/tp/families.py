"""Facts about model families, as data: what their projections and attributes are called. No logic.

Names are the last component of a module's path. A module outside these tables is split by sizes alone, which is right
unless its forward reshapes into heads; then give the rule a `unit`, or add a row here.
"""

from __future__ import annotations

QUERY_NAMES = frozenset(
    [
        "q_proj",
        "to_q",
        "add_q_proj",
        "wq",
        "query",
        "q",
        "query_proj",
        "q_lin",
        "q_linear",
        "linear_q",
        "self_attn_q",
        "W_q",
        "Wq",
        "q_b_proj",
        "q_attn",
    ]
)
KEY_NAMES = frozenset(
    ["k_proj", "to_k", "add_k_proj", "wk", "key", "k", "key_proj", "k_lin", "k_linear", "linear_k", "W_k", "Wk"]
)
VALUE_NAMES = frozenset(
    ["v_proj", "to_v", "add_v_proj", "wv", "value", "v", "value_proj", "v_lin", "v_linear", "linear_v", "W_v", "Wv"]
)
FUSED_QKV_NAMES = frozenset(["qkv_proj", "qkv", "to_qkv", "Wqkv", "wqkv", "c_attn", "to_qkv_mlp_proj", "to_added_qkv", "W_pack"])
FUSED_KV_NAMES = frozenset(["kv_proj", "kv", "to_kv", "to_added_kv"])

QUERY_NORM_NAMES = frozenset(["q_norm", "norm_q", "norm_added_q", "query_norm", "q_layernorm", "query_layernorm"])
KEY_NORM_NAMES = frozenset(["k_norm", "norm_k", "norm_added_k", "key_norm", "k_layernorm", "key_layernorm"])

HEAD_DIM_ATTRIBUTES = ("head_dim", "dim_head", "attention_head_dim", "head_size", "attention_head_size", "d_head", "dim_per_head")
NUM_HEADS_ATTRIBUTES = ("num_heads", "heads", "n_heads", "num_attention_heads", "n_head", "n_local_heads", "nhead", "h")
NUM_KV_HEADS_ATTRIBUTES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_local_kv_heads", "kv_heads", "n_kv_head")
GROUPS_ATTRIBUTES = ("num_key_value_groups", "n_rep", "num_groups", "kv_groups", "num_queries_per_kv")
LOCAL_Q_SIZE_ATTRIBUTES = ("all_head_size", "split_size", "q_size")
LOCAL_KV_SIZE_ATTRIBUTES = ("kv_size",)
"""Attributes that forwards use only to reshape or cut their own projections: they take the local size wherever they exist."""

LOCAL_SIZE_CLASSES: dict[str, dict[str, tuple[str, ...]]] = {
    "Flux2ParallelSelfAttention": {"q": ("inner_dim",), "mlp": ("mlp_hidden_dim",)},
    "Attention": {"q": ("inner_dim", "inner_kv_dim"), "mlp": ()},
    "T5Attention": {"q": ("inner_dim",), "mlp": ()},
}
"""Classes of which more attributes are of that kind."""

CONFIG_HEADS = ("num_attention_heads", "n_head", "num_heads")
CONFIG_KV_HEADS = ("num_key_value_heads",)
"""Read from a private copy of the module's config, where the module cuts a fused projection by its config."""

NUM_EXPERTS_ATTRIBUTES = ("num_experts", "n_routed_experts", "num_local_experts")

QUANTIZED_CLASS_PARTS = (
    "Linear4bit", "Linear8bitLt", "QuantLinear", "WQLinear", "HqqLinear", "HQQLinear", "AqlmLinear", "QuantizedLinear",
    "FP8Linear", "QLinear", "EetqLinear", "GGUFLinear", "BitLinear", "QuantizedEmbedding", "Fp8Experts", "LinearPackedParams",
)  # fmt: skip
QUANTIZED_TENSOR_PARTS = ("Params4bit", "Int8Params", "AffineQuantizedTensor", "GGUFParameter", "QTensor", "NF4Tensor")
