"""Every style against the unsharded module; the cases run on every rank of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.tp import ExpertParallel, PackedColwiseParallel, PackedRowwiseParallel, TensorParallelConfig
from tests.tp import models, parity

QKV_O = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
LOADS = [9.0, 1.0, 1.0, 1.0, 7.0, 1.0, 1.0, 5.0, 1.0, 1.0, 1.0, 3.0]

Factory = Callable[[bool], nn.Module]
STYLES: dict[str, tuple[Factory, dict[str, Any], dict[str, int]]] = {
    # name: (module, plan, collectives of one forward)
    "colwise": (lambda b: models.Mlp(b).up, {"": "colwise"}, {}),
    "colwise+rowwise": (lambda b: models.Mlp(b), {"up": "colwise", "down": "rowwise"}, {"all_reduce": 1}),
    "colwise_gather_output": (lambda b: models.Mlp(b), {"up": "colwise_gather_output"}, {"all_gather": 1}),
    "rowwise_split_input": (lambda b: models.Mlp(b), {"down": "rowwise_split_input"}, {"all_reduce": 1}),
    "packed_colwise": (
        lambda b: models.GateUp(b),
        {"gate_up": PackedColwiseParallel([1, 1]), "down": "rowwise"},
        {"all_reduce": 1},
    ),
    "packed_rowwise": (
        lambda b: models.TwoPart(b),
        {"a": "colwise", "b": "colwise", "out": PackedRowwiseParallel()},
        {"all_reduce": 1},
    ),
    "packed_both": (
        lambda b: models.FusedMlp(b, wide=3),
        {"proj_in": PackedColwiseParallel(), "proj_out": PackedRowwiseParallel([1, 3])},
        {"all_reduce": 1},
    ),
    "heads": (lambda b: models.Attention(b), QKV_O, {"all_reduce": 1}),
    "heads_gqa": (lambda b: models.Attention(b, kv_heads=2), QKV_O, {"all_reduce": 1}),
    "heads_gqa_uneven_groups": (lambda b: models.Attention(b, kv_heads=3), QKV_O, {"all_reduce": 1}),
    "heads_mqa": (lambda b: models.Attention(b, kv_heads=1), QKV_O, {"all_reduce": 1}),
    "qk_norm_head": (lambda b: models.Attention(b, kv_heads=2, qk_norm="head"), QKV_O, {"all_reduce": 1}),
    "qk_norm_all": (lambda b: models.Attention(b, qk_norm="all"), QKV_O, {"all_reduce": 3}),
    "qk_norm_all_gqa": (lambda b: models.Attention(b, kv_heads=2, qk_norm="all"), QKV_O, {"all_reduce": 3}),
    "vocab": (
        lambda b: models.Vocabulary(b),
        {"embed": "embedding_rowwise", "head": "colwise_gather_output"},
        {"all_reduce": 1, "all_gather": 1},
    ),
    "vocab_tied": (
        lambda b: models.Vocabulary(b, tied=True),
        {"head": "colwise_gather_output"},
        {"all_reduce": 1, "all_gather": 1},
    ),
    "vocab_padding": (
        lambda b: models.Vocabulary(b, padding_idx=17),
        {"embed": "embedding_rowwise", "head": "colwise_gather_output"},
        {"all_reduce": 1, "all_gather": 1},
    ),
    "embedding_colwise": (lambda b: models.Vocabulary(b), {"embed": "embedding_colwise"}, {"all_gather": 1}),
    "sequence": (
        lambda b: models.SequenceBlock(b),
        {
            "first": "split_sequence",
            "norm": "sequence_parallel",
            "up": "colwise_sequence",
            "down": "rowwise_sequence",
            "last": "gather_sequence",
        },
        {"all_gather": 2, "reduce_scatter": 1},
    ),
    "moe_tensor": (
        lambda b: models.Moe(b),
        {"experts": "moe_tp_experts", "experts.gate_up_proj": "packed_colwise", "experts.down_proj": "rowwise"},
        {"all_reduce": 1},
    ),
    "moe_expert": (lambda b: models.Moe(b), {"router": "moe_router", "experts": "expert_parallel"}, {"all_reduce": 1}),
    "moe_expert_loads": (lambda b: models.Moe(b), {"experts": ExpertParallel(LOADS)}, {"all_reduce": 1}),
    "quant_blocks": (lambda b: models.QuantMlp(b), {"up": "colwise", "down": "rowwise"}, {"all_reduce": 1}),
}
"""The module is built anew for each case; '' names the root."""


class Holder(nn.Module):
    """Gives a lone module a name, and its input a parameter before it, so that input gradients are compared too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.before = nn.Parameter(torch.randn(models.WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.before if x.is_floating_point() else x)


def style(rank: int, world: int, *, name: str, shares: list[float] | None, bias: bool, dtype: str = "float32") -> dict[str, Any]:
    """One style on one split: see `parity.compare`."""
    factory, plan, calls = STYLES[name]
    torch.manual_seed(11)
    model = Holder(factory(bias)).to(getattr(torch, dtype))
    rules = {f"inner.{rule}".rstrip("."): value for rule, value in plan.items()}
    if "vocab" in name or "embedding" in name:
        x: torch.Tensor = torch.randint(0, models.VOCAB, (2, 9))
        x[0, :4] = 17
    else:
        x = torch.randn(2, 7, models.WIDTH).to(getattr(torch, dtype))
    run = _gathering(name, world)
    config = TensorParallelConfig(tp_degree=world, shares=shares)
    out = parity.compare(model, rules, lambda m: run(m, x), config=config)
    out |= {
        "undo_" + key: value
        for key, value in parity.compare(model, rules, lambda m: run(m, x), config=config, train=False).items()
    }
    out["expected_calls"] = calls if world > 1 else {}
    return out


def _gathering(name: str, world: int) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """A lone colwise module leaves its output split: it is joined here, outside the count."""
    from shardwise.tp.functional import gather_shards

    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        bound = model.inner.__dict__.get("_tp_shard")  # type: ignore[union-attr]
        if name != "colwise" or bound is None or world == 1:
            return y
        before = dict(bound.comm.stats.calls)
        full = gather_shards(y, bound.comm, bound.shard.part)
        bound.comm.stats.calls.clear()
        bound.comm.stats.calls.update(before)
        return full

    return run
