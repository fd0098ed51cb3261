"""The tiny models, by name. A name is the architecture's, or `architecture/variant`.

Sliding windows are 16 positions wide, so that a prompt of 40 tokens tells a windowed layer from a full one; gemma's
hidden sizes have no whole root, so that scaling there and back would not be exact.
"""

from __future__ import annotations

from typing import Any

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

_LAYER_NORM: dict[str, Any] = {"rms_norm": False, "norm_bias": True}
_BIASES: dict[str, Any] = {"qkv_bias": True, "attn_out_bias": True, "ffn_bias": True}
_MOE: dict[str, Any] = {"ffn": "moe", "experts": 4, "experts_used": 2}
_EXPERT_FF = {"expert_feed_forward_length": 256}
_SHARED = {"expert_shared_count": 1}
_MORE = {
    "apertus": Spec(
        "apertus",
        qk_norm="head",
        ffn="plain",
        plain_keys={
            "xielu.alpha_n": [0.5, 0.6, 0.7, 0.8],
            "xielu.alpha_p": [0.9, 0.8, 0.7, 0.6],
            "xielu.beta": [0.5, 0.5, 0.4, 0.4],
            "xielu.eps": [-1e-6, -1e-6, -2e-6, -1e-6],
        },
    ),
    "arcee": Spec("arcee", ffn="plain"),
    "bailingmoe": Spec("bailingmoe", **_MOE, shared_expert_ff=256, keys=_EXPERT_FF | _SHARED | {"leading_dense_block_count": 0}),
    "bailingmoe2": Spec(
        "bailingmoe2",
        **_MOE,
        qkv="fused",
        qk_norm="head",
        shared_expert_ff=256,
        leading_dense=2,
        keys=_EXPERT_FF | _SHARED | {"leading_dense_block_count": 2, "expert_gating_func": 2},
    ),
    "bloom": Spec(
        "bloom",
        **_LAYER_NORM,
        **_BIASES,
        heads_kv=4,
        qkv="fused",
        ffn="plain",
        tied=True,
        extra=(("token_embd_norm.weight", (256,)), ("token_embd_norm.bias", (256,))),
    ),
    "chatglm": Spec("chatglm", qkv="fused", qkv_bias=True, ffn="up_gate", keys={"rope.dimension_count": 32}),
    "cohere2": Spec(
        "cohere2",
        num_layers=6,
        rms_norm=False,
        ffn_norm=False,
        tied=True,
        keys=_WINDOW | {"logit_scale": 0.25},
    ),
    "command-r": Spec("command-r", rms_norm=False, ffn_norm=False, tied=True, keys={"logit_scale": 0.0625}),
    "dbrx": Spec(
        "dbrx",
        **_MOE,
        rms_norm=False,
        expert_ff=512,
        qkv="fused",
        ffn_norm=False,
        keys={"attention.clamp_kqv": 8.0},
        extra_layer=(("attn_output_norm.weight", (256,)),),
    ),
    "deepseek": Spec(
        "deepseek",
        **_MOE,
        heads_kv=4,
        shared_expert_ff=256,
        leading_dense=1,
        keys=_EXPERT_FF | _SHARED | {"leading_dense_block_count": 1},
    ),
    "dots1": Spec(
        "dots1",
        **_MOE,
        heads_kv=4,
        qk_norm="head",
        shared_expert_ff=256,
        leading_dense=1,
        keys=_EXPERT_FF | _SHARED | {"leading_dense_block_count": 1, "expert_gating_func": 2},
    ),
    "ernie4_5": Spec("ernie4_5", tied=True),
    "ernie4_5-moe": Spec(
        "ernie4_5-moe",
        **_MOE,
        shared_expert_ff=256,
        leading_dense=1,
        keys=_EXPERT_FF
        | {
            "expert_shared_feed_forward_length": 256,
            "leading_dense_block_count": 1,
            "interleave_moe_layer_step": 1,
        },
    ),
    "exaone": Spec("exaone", tied=True, extra=(("rope_freqs.weight", (32,)),)),
    "exaone4": Spec(
        "exaone4", attn_norm=False, ffn_norm=False, post_attn_norm=True, post_ffn_norm=True, qk_norm="head", tied=True
    ),
    "falcon": Spec("falcon", **_LAYER_NORM, qkv="fused", ffn="plain", ffn_norm=False, heads_kv=1),
    "gemma": Spec("gemma", embd=288, tied=True),
    "gpt2": Spec(
        "gpt2",
        **_LAYER_NORM,
        **_BIASES,
        heads_kv=4,
        qkv="fused",
        ffn="plain",
        tied=True,
        extra=(("position_embd.weight", (256, 512)),),
    ),
    "gptneox": Spec(
        "gptneox", **_LAYER_NORM, **_BIASES, heads_kv=4, qkv="fused", ffn="plain", keys={"use_parallel_residual": True}
    ),
    "gptneox/serial": Spec(
        "gptneox", **_LAYER_NORM, **_BIASES, heads_kv=4, qkv="fused", ffn="plain", keys={"use_parallel_residual": False}
    ),
    "granitemoe": Spec(
        "granitemoe",
        **_MOE,
        expert_ff=512,
        tied=True,
        keys={"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.015625, "logit_scale": 6.0},
    ),
    "hunyuan-dense": Spec("hunyuan-dense", qk_norm="head", tied=True),
    "hunyuan-moe": Spec(
        "hunyuan-moe",
        **_MOE,
        expert_ff=512,
        qk_norm="head",
        shared_expert_ff=256,
        tied=True,
        keys=_EXPERT_FF | {"expert_shared_feed_forward_length": 256},
    ),
    "internlm2": Spec("internlm2"),
    "llama4": Spec(
        "llama4",
        **_MOE,
        num_layers=12,
        shared_expert_ff=256,
        dense_every=2,
        keys=_EXPERT_FF | {"interleave_moe_layer_step": 2, "attention.sliding_window": 16},
    ),
    "minicpm": Spec("minicpm", tied=True, keys={"embedding_scale": 12.0, "residual_scale": 0.31, "logit_scale": 0.11}),
    "minimax-m2": Spec(
        "minimax-m2",
        **_MOE,
        expert_ff=512,
        qk_norm="full",
        keys=_EXPERT_FF | {"expert_gating_func": 2},
        extra_layer=(("exp_probs_b.bias", (4,)),),
    ),
    "mistral3": Spec("mistral3", keys={"attention.temperature_scale": 0.1, "rope.scaling.original_context_length": 16}),
    "mpt": Spec("mpt", rms_norm=False, heads_kv=4, qkv="fused", ffn="plain", tied=True, keys={"attention.max_alibi_bias": 8.0}),
    "nemotron": Spec("nemotron", **_LAYER_NORM, ffn="plain"),
    "olmo": Spec("olmo", rms_norm=False, attn_norm=False, ffn_norm=False, final_norm=False, keys={"attention.clamp_kqv": 8.0}),
    "olmoe": Spec("olmoe", **_MOE, expert_ff=512, heads_kv=4, qk_norm="full"),
    "orion": Spec("orion", **_LAYER_NORM),
    "phi2": Spec(
        "phi2",
        **_LAYER_NORM,
        **_BIASES,
        heads_kv=4,
        ffn="plain",
        ffn_norm=False,
        output_bias=True,
        keys={"rope.dimension_count": 32},
    ),
    "phimoe": Spec(
        "phimoe",
        **_MOE,
        norm_bias=True,
        expert_ff=512,
        qkv_bias=True,
        attn_out_bias=True,
        output_bias=True,
    ),
    "qwen": Spec("qwen", heads_kv=4, qkv="fused", qkv_bias=True, ff=1024, ffn_width=512),
    "qwen2moe": Spec(
        "qwen2moe",
        **_MOE,
        qkv_bias=True,
        shared_expert_ff=512,
        shared_expert_gate=True,
        keys=_EXPERT_FF | {"expert_shared_feed_forward_length": 512},
    ),
    "seed_oss": Spec("seed_oss", qkv_bias=True, ffn_norm=False, post_attn_norm=True),
    "smollm3": Spec("smollm3", num_layers=12, tied=True),
    "stablelm": Spec("stablelm", **_LAYER_NORM, keys={"rope.dimension_count": 16}),
    "stablelm/12b": Spec("stablelm", **_LAYER_NORM, qk_norm="heads", ffn_norm=False),
    "starcoder": Spec(
        "starcoder",
        **_LAYER_NORM,
        **_BIASES,
        heads_kv=1,
        qkv="fused",
        ffn="plain",
        extra=(("position_embd.weight", (256, 512)),),
    ),
    "xverse": Spec("xverse", heads_kv=4),
}
SPECS |= _MORE
