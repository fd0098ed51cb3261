"""Tiny models of real architectures from transformers and diffusers, with random weights, against themselves unsharded."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn

from shardwise.tp import PackedColwiseParallel, TensorParallelConfig, apply_tensor_parallel, gather
from tests.tp.parity import full_grads, relative, same_bits

STEPS = 8


_LATENT = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 12,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}


def _language_configs(heads: int, kv_heads: int, layers: int) -> dict[str, Any]:
    """Sizes that a home user's model has, made tiny: head size 8, hidden 48."""
    import transformers as tf

    common = {
        "vocab_size": 97,
        "hidden_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    wide = common | {"intermediate_size": 96}
    moe = common | {"intermediate_size": 96, "num_experts_per_tok": 2}
    return {
        "llama": tf.LlamaConfig(**wide, head_dim=8),
        "qwen3": tf.Qwen3Config(**wide, head_dim=8, tie_word_embeddings=True),
        "qwen3_moe": tf.Qwen3MoeConfig(**moe, head_dim=8, num_experts=12, moe_intermediate_size=24, norm_topk_prob=True),
        "mixtral": tf.MixtralConfig(**moe, head_dim=8, num_local_experts=12),
        "phi3": tf.Phi3Config(**(wide | {"hidden_size": 8 * heads})),
        "minimax_m2": tf.MiniMaxM2Config(**moe, head_dim=8, num_local_experts=12, rotary_dim=4),
        "olmo2": tf.Olmo2Config(**(wide | {"hidden_size": 8 * heads})),
        "deepseek_v3": tf.DeepseekV3Config(**(moe | {"num_key_value_heads": heads} | _LATENT)),
        "gpt2": tf.GPT2Config(
            vocab_size=97, n_embd=8 * heads, n_layer=layers, n_head=heads, n_positions=64, bos_token_id=1, eos_token_id=2
        ),
        "gemma3": tf.Gemma3TextConfig(**wide, head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    }


def language_model(name: str, heads: int, kv_heads: int, layers: int = 2) -> nn.Module:
    """A randomly initialised model in eval mode; alike on every rank."""
    import transformers as tf

    config = _language_configs(heads, kv_heads, layers)[name]
    torch.manual_seed(3)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.3, 0.3) if parameter.dim() > 1 else parameter.add_(torch.rand_like(parameter) * 0.2)
    model.tie_weights()
    return model


PLANS: dict[str, dict[str, dict[str, Any]]] = {
    "phi3": {
        "packed": {
            "model.layers.*.self_attn.qkv_proj": "packed_colwise",
            "model.layers.*.self_attn.o_proj": "rowwise",
            "model.layers.*.mlp.gate_up_proj": "packed_colwise",
            "model.layers.*.mlp.down_proj": "rowwise",
        }
    },
    "gpt2": {
        "packed": {
            "transformer.h.*.attn.c_attn": PackedColwiseParallel([1, 1, 1]),
            "transformer.h.*.attn.c_proj": "rowwise",
            "transformer.h.*.mlp.c_fc": "colwise",
            "transformer.h.*.mlp.c_proj": "rowwise",
            "lm_head": "colwise_gather_output",
        }
    },
    "deepseek_v3": {
        "heads": {
            "model.layers.*.self_attn.q_b_proj": "colwise",
            "model.layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
            "model.layers.*.self_attn.kv_b_proj": "colwise",
            "model.layers.*.self_attn.o_proj": "rowwise",
        }
    },
    "experts": {"expert_parallel": {"model.layers.*.mlp.experts": "expert_parallel"}},
}


def language(
    rank: int,
    world: int,
    *,
    name: str,
    heads: int,
    kv_heads: int,
    shares: list[float] | None,
    plan: str = "own",
    train: bool = False,
) -> dict[str, Any]:
    """Logits and greedy tokens at every step (with KV cache) equal to the unsharded model's."""
    warnings.simplefilter("ignore")
    model = language_model(name, heads, kv_heads)
    rules = _plan(model, name, plan)
    split = apply_tensor_parallel(copy.deepcopy(model), TensorParallelConfig(tp_degree=world, shares=shares), rules, strict=False)
    ids = torch.randint(3, 97, (2, 6), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        want, got = model(ids).logits, split(ids).logits
        out: dict[str, Any] = {"logits": relative(got, want)}
        tokens = [_greedy(m, ids) for m in (model, split)]
    out["tokens_equal"] = tokens[0] == tokens[1]
    full, original = gather(split), model.state_dict()
    out["gather_exact"] = all(same_bits(full[key], original[key]) for key in original)
    if train:
        for one in (model, split):
            one(ids, labels=ids).loss.backward()
        grads = full_grads(split)
        wanted = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        out["grads"], out["worst_grad"] = max((relative(grads[n], wanted[n]), n) for n in wanted)
    return out


def _plan(model: nn.Module, name: str, plan: str) -> dict[str, Any] | None:
    if plan == "own":
        return None
    if plan == "expert_parallel":
        return {**model.tp_plan, **PLANS["experts"]["expert_parallel"]} | {
            key: "grouped_gemm" for key in model.tp_plan if ".experts." in key
        }  # what the expert plan of transformers says
    rules = dict(PLANS[name][plan])
    if name == "phi3":
        config = model.config
        size = config.hidden_size // config.num_attention_heads
        blocks = [config.num_attention_heads * size, config.num_key_value_heads * size, config.num_key_value_heads * size]
        rules["model.layers.*.self_attn.qkv_proj"] = PackedColwiseParallel(blocks)
    return rules


def _greedy(model: nn.Module, ids: torch.Tensor) -> list[list[int]]:
    """Token ids of each step, with the model's own KV cache."""
    from transformers import DynamicCache

    cache, tokens, step = DynamicCache(config=model.config), [], ids
    for _ in range(STEPS):
        step = model(step, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
        tokens.append(step.flatten().tolist())
    return tokens
