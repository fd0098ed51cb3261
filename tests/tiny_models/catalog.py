"""The tiny models, by name. A name is the architecture's, or `architecture/variant`.

Sliding windows are 16 positions wide, so that a prompt of 40 tokens tells a windowed layer from a full one; gemma's
hidden sizes have no whole root, so that scaling there and back would not be exact.
"""

from __future__ import annotations

from tests.tiny_models.spec import Spec

_WINDOW = {"attention.sliding_window": 16}
_GPT_OSS_LAYER = (("attn_sinks.weight", (4,)),)

SPECS: dict[str, Spec] = {
    "llama": Spec("llama"),
    "llama/tied": Spec("llama", tied=True),
    "llama/moe": Spec("llama", ffn="moe", experts=4, experts_used=2, expert_ff=512),
    "qwen2": Spec("qwen2", qkv_bias=True),
    "qwen3": Spec("qwen3", qk_norm="head", tied=True),
    "qwen3moe": Spec("qwen3moe", qk_norm="head", ffn="moe", experts=8, experts_used=2, keys={"expert_feed_forward_length": 256}),
    "gemma2": Spec(
        "gemma2",
        num_layers=5,
        embd=288,
        tied=True,
        post_attn_norm=True,
        post_ffn_norm=True,
        keys=_WINDOW | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": Spec(
        "gemma3",
        num_layers=8,
        embd=288,
        tied=True,
        qk_norm="head",
        post_attn_norm=True,
        post_ffn_norm=True,
        keys=_WINDOW | {"rope.freq_base_swa": 500.0},
    ),
    "phi3": Spec("phi3", qkv="fused", ffn="up_gate", extra=(), keys=_WINDOW),
    "phi3/longrope": Spec(
        "phi3",
        qkv="fused",
        ffn="up_gate",
        context=4096,
        keys={
            "rope.scaling.original_context_length": 32,
            "rope.scaling.type": "longrope",
            "rope.scaling.attn_factor": 1.19,
        },
        extra=(("rope_factors_long.weight", (32,)), ("rope_factors_short.weight", (32,))),
    ),
    "starcoder2": Spec(
        "starcoder2",
        rms_norm=False,
        norm_bias=True,
        qkv_bias=True,
        attn_out_bias=True,
        ffn="plain",
        ffn_bias=True,
        tied=True,
    ),
    "olmo2": Spec("olmo2", attn_norm=False, ffn_norm=False, post_attn_norm=True, post_ffn_norm=True, qk_norm="full"),
    "olmo2/windows": Spec(
        "olmo2",
        num_layers=6,
        attn_norm=False,
        ffn_norm=False,
        post_attn_norm=True,
        post_ffn_norm=True,
        qk_norm="full",
        keys=_WINDOW,
    ),
    "granite": Spec(
        "granite",
        tied=True,
        keys={"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.015625, "logit_scale": 8.0},
    ),
    "gpt-oss": Spec(
        "gpt-oss",
        num_layers=5,
        ffn_norm=False,
        post_attn_norm=True,
        qkv_bias=True,
        attn_out_bias=True,
        ffn="moe",
        ffn_bias=True,
        experts=4,
        experts_used=2,
        keys=_WINDOW
        | {
            "expert_feed_forward_length": 256,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 64,
        },
        extra_layer=_GPT_OSS_LAYER,
    ),
}
