"""Small modules, one for each style. Sizes divide by 2, 3 and 4, so that the same module serves even splits at all degrees."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 24, 48, 12, 12, 4, 60


class Mlp(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class FusedMlp(nn.Module):
    """A narrow branch, a gate and an up of another width in one projection; narrow and gated joined on the way out."""

    _tp_local_attributes = ("narrow", "wide")

    def __init__(self, bias: bool = True, wide: int = 1) -> None:
        super().__init__()
        self.narrow, self.wide = 24, 24 * wide
        self.proj_in = nn.Linear(WIDTH, self.narrow + 2 * self.wide, bias=bias)
        self.proj_in._tp_packed_col_blocks = [self.narrow, self.wide, self.wide]
        self.proj_out = nn.Linear(self.narrow + self.wide, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, gate, up = self.proj_in(x).split([self.narrow, self.wide, self.wide], -1)
        return self.proj_out(torch.cat([torch.tanh(a), F.silu(gate) * up], -1))


class GateUp(nn.Module):
    """The usual fused gate and up, cut apart by `chunk`."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=bias)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class TwoPart(nn.Module):
    """Two branches that end in one projection over their joined features: packed rows."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 24, bias=bias)
        self.b = nn.Linear(WIDTH, 72, bias=bias)
        self.out = nn.Linear(96, WIDTH, bias=bias)
        self.out._tp_packed_row_blocks = [1, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([torch.tanh(self.a(x)), F.gelu(self.b(x))], -1))


class Attention(nn.Module):
    def __init__(
        self, bias: bool = True, heads: int = HEADS, kv_heads: int = KV_HEADS, qk_norm: str = "none", head_dim: int = HEAD_DIM
    ) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, kv_heads, head_dim
        self.num_key_value_groups = heads // kv_heads
        self.q_proj = nn.Linear(WIDTH, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(WIDTH, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(WIDTH, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, WIDTH, bias=bias)
        self.qk_norm = qk_norm
        if qk_norm != "none":
            width = head_dim if qk_norm == "head" else heads * head_dim
            kv_width = head_dim if qk_norm == "head" else kv_heads * head_dim
            self.q_norm, self.k_norm = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(kv_width, eps=1e-6)
            with torch.no_grad():
                self.q_norm.weight.uniform_(0.5, 1.5)
                self.k_norm.weight.uniform_(0.5, 1.5)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        shape = (*x_BTD.shape[:-1], -1, self.head_dim)
        q, k, v = self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD)
        if self.qk_norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.view(shape) for t in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        k = k.repeat_interleave(self.num_key_value_groups, -2)
        v = v.repeat_interleave(self.num_key_value_groups, -2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class Vocabulary(nn.Module):
    """Embedding and head; `tied` makes them one tensor."""

    def __init__(self, bias: bool = True, tied: bool = False, padding_idx: int | None = None, vocab: int = VOCAB) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, WIDTH, padding_idx=padding_idx)
        self.head = nn.Linear(WIDTH, vocab, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(ids_BT)))


class SequenceBlock(nn.Module):
    """A residual MLP whose norm and residual run on local rows; `first` and `last` cut and join the sequence."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Identity(), nn.Identity()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=bias)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x = self.first(x_BTD)
        return self.last(x + self.down(F.gelu(self.up(self.norm(x)))))


class Experts(nn.Module):
    """Fused experts with the forward that transformers gives them (the number after the last means: not here)."""

    def __init__(self, num_experts: int = 12, hidden: int = 12) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, 2 * hidden, WIDTH) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(num_experts, WIDTH, hidden) * 0.2)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, slot = torch.where(index == expert)
            if token.numel() == 0:
                continue
            gate, up = F.linear(x[token], self.gate_up_proj[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down_proj[expert])
            out = out.index_add(0, token, y * weights[token, slot, None])
        return out


class Moe(nn.Module):
    def __init__(self, bias: bool = True, num_experts: int = 12, top_k: int = 2) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, num_experts, bias=bias)
        self.experts = Experts(num_experts)
        self.top_k = top_k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, index = torch.softmax(self.router(flat), -1).topk(self.top_k, -1)
        return self.experts(flat, index, weights).view(x.shape)


class BlockQuantLinear(nn.Module):
    """int8 weights with one scale for each block of inputs: a quantized module that says how it may be cut."""

    def __init__(self, inputs: int, outputs: int, block: int = 8, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features, self._tp_quant_block = inputs, outputs, block
        self.register_buffer("weight", torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(outputs, inputs // block) * 0.01)
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scales.repeat_interleave(self._tp_quant_block, 1)
        return F.linear(x, self.weight.float() * scale, self.bias)


class QuantMlp(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up = BlockQuantLinear(WIDTH, 96, bias=bias)
        self.down = BlockQuantLinear(96, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))
