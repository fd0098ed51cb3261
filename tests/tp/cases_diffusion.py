"""Tiny diffusion transformers of diffusers, with random weights, against themselves unsharded."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.tp import TensorParallelConfig, apply_tensor_parallel, gather
from tests.tp.parity import full_grads, relative, same_bits

HEADS, SIZE = 12, 8
Built = tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]


def flux() -> Built:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=SIZE, num_attention_heads=HEADS,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[2, 2, 4],
    )  # fmt: skip
    x, text, pooled = torch.randn(1, 9, 4), torch.randn(1, 5, 32), torch.randn(1, 32)
    ids = torch.randint(0, 3, (9, 3)).float()

    def run(m: nn.Module) -> torch.Tensor:
        return m(
            hidden_states=x, encoder_hidden_states=text, pooled_projections=pooled, timestep=torch.tensor([0.7]), img_ids=ids,
            txt_ids=torch.zeros(5, 3), return_dict=False,
        )[0]  # fmt: skip

    return model, run


def flux2() -> Built:
    from diffusers import Flux2Transformer2DModel

    model = Flux2Transformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=SIZE, num_attention_heads=HEADS,
        joint_attention_dim=32, timestep_guidance_channels=32, mlp_ratio=3.0, axes_dims_rope=(2, 2, 2, 2),
    )  # fmt: skip
    x, text = torch.randn(1, 9, 4), torch.randn(1, 5, 32)
    ids, text_ids = torch.randint(0, 3, (1, 9, 4)), torch.zeros(1, 5, 4, dtype=torch.long)

    def run(m: nn.Module) -> torch.Tensor:
        return m(
            hidden_states=x, encoder_hidden_states=text, timestep=torch.tensor([0.7]), img_ids=ids, txt_ids=text_ids,
            guidance=torch.tensor([3.0]), return_dict=False,
        )[0]  # fmt: skip

    return model, run


def qwen_image() -> Built:
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=SIZE, num_attention_heads=HEADS,
        joint_attention_dim=32, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    x, text = torch.randn(1, 9, 16), torch.randn(1, 5, 32)

    def run(m: nn.Module) -> torch.Tensor:
        return m(
            hidden_states=x, encoder_hidden_states=text, encoder_hidden_states_mask=torch.ones(1, 5, dtype=torch.bool),
            timestep=torch.tensor([0.7]), img_shapes=[[(1, 3, 3)]], return_dict=False,
        )[0]  # fmt: skip

    return model, run


def wan() -> Built:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=HEADS, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=32,
        freq_dim=32, ffn_dim=96, num_layers=2, qk_norm="rms_norm_across_heads", rope_max_seq_len=32, cross_attn_norm=True,
    )  # fmt: skip
    x, text = torch.randn(1, 4, 2, 4, 4), torch.randn(1, 5, 32)

    def run(m: nn.Module) -> torch.Tensor:
        return m(hidden_states=x, encoder_hidden_states=text, timestep=torch.tensor([300]), return_dict=False)[0]

    return model, run


WAN_PLAN = {
    "blocks.*.attn*.to_q": "colwise",
    "blocks.*.attn*.to_k": "colwise",
    "blocks.*.attn*.to_v": "colwise",
    "blocks.*.attn*.to_out.0": "rowwise",
    "blocks.*.ffn.net.0.proj": "colwise",
    "blocks.*.ffn.net.2": "rowwise",
}
"""diffusers has no plan for Wan: its norms over all heads cannot be split there."""

BUILDERS: dict[str, tuple[Callable[[], Built], dict[str, str] | None]] = {
    "flux": (flux, None),
    "flux2": (flux2, None),
    "qwen_image": (qwen_image, None),
    "wan": (wan, WAN_PLAN),
}


def build(name: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor], dict[str, str] | None]:
    """Alike on every rank; weights spread so that every part matters."""
    builder, plan = BUILDERS[name]
    torch.manual_seed(4)
    model, run = builder()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.2, 0.2) if parameter.dim() > 1 else parameter.add_(torch.rand_like(parameter) * 0.2)
    return model.eval(), run, plan


def diffusion(rank: int, world: int, *, name: str, shares: list[float] | None, train: bool = False) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    model, run, plan = build(name)
    split = apply_tensor_parallel(copy.deepcopy(model), TensorParallelConfig(tp_degree=world, shares=shares), plan)
    with torch.no_grad():
        out: dict[str, Any] = {"forward": relative(run(split), run(model))}
    full, original = gather(split), model.state_dict()
    out["gather_exact"] = all(same_bits(full[key], original[key]) for key in original)
    if train:
        for one in (model, split):
            run(one).square().sum().backward()
        grads = full_grads(split)
        wanted = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        out["grads"], out["worst_grad"] = max((relative(grads[n], wanted[n]), n) for n in wanted)
    return out
