"""Sums with less traffic: int8 or fp8 on the wire, with a stated bound, and exact sums where compression would not pay.

The algorithm is a reduce-scatter and an all-gather: each rank cuts its tensor into one part per rank, quantizes in blocks of
`BLOCK` values with one fp32 scale each, exchanges, sums in fp32, quantizes the finished part and gathers it. Every rank
dequantizes the same bytes, so all hold the same bits.

Error bound for one element, a_r the largest magnitude in its block on rank r and s that of the block of sums:
    int8: (sum of a_r + s') / 254, s' <= sum of a_r (rounding to the nearest of 255 levels, twice)
    fp8 (e4m3fn): each of the two roundings is at most 2^-4 of the value plus 2^-10 of the block's largest / 448 * 448
Source of the scheme: ZeRO++ (arXiv:2306.10209), without its hierarchy.

Promises: tensors below `min_bytes`, and all that are not floating point, are summed exactly. Gradients (backward) are exact
unless asked for. Fails when: a value is not finite (the block then becomes NaN, as it would in the exact sum).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.tp.collectives import Collectives

BLOCK = 128
MIN_BYTES = 16 * 1024


class Compressed(Collectives):
    """Another `Collectives`, whose large floating-point sums travel in 8 bits."""

    def __init__(self, inner: Collectives, kind: str = "int8", *, min_bytes: int = MIN_BYTES) -> None:
        super().__init__(inner.rank, inner.size)
        self.inner, self.kind, self.min_bytes = inner, kind, min_bytes
        self.stats = inner.stats

    def start_all_reduce(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        num_bytes = x.numel() * x.element_size()
        if self.size == 1 or not x.is_floating_point() or num_bytes < self.min_bytes:
            return self.inner.start_all_reduce(x)
        total = self._compressed_sum(x)
        return lambda: total

    def _compressed_sum(self, x: torch.Tensor) -> torch.Tensor:
        length = -(-x.numel() // (self.size * BLOCK)) * BLOCK
        rows = x.new_zeros(self.size * length, dtype=torch.float32)
        rows[: x.numel()] = x.reshape(-1)
        packed = torch.stack([encode(row, self.kind) for row in rows.view(self.size, length)])
        self.stats.record("all_reduce_compressed", packed.numel())
        received = self.inner._exchange_equal(packed)
        total = torch.zeros(length, device=x.device)
        for row in received:
            total += decode(row, length, self.kind)
        gathered = self.inner._gather_equal(encode(total, self.kind))
        full = torch.cat([decode(part, length, self.kind) for part in gathered])
        return full[: x.numel()].view(x.shape).to(x.dtype)

    @property
    def device(self) -> torch.device:
        return self.inner.device

    def _sum(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        return self.inner._sum(x)

    def _gather_equal(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return self.inner._gather_equal(flat)

    def _exchange_equal(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner._exchange_equal(rows)

    def _broadcast(self, x: torch.Tensor, source: int) -> None:
        self.inner._broadcast(x, source)

    def send(self, x: torch.Tensor, target: int) -> None:
        self.inner.send(x, target)

    def receive(self, x: torch.Tensor, source: int) -> None:
        self.inner.receive(x, source)


def encode(values: torch.Tensor, kind: str) -> torch.Tensor:
    """fp32 (n,), n a multiple of BLOCK -> bytes: n codes, then one fp32 scale a block."""
    blocks = values.view(-1, BLOCK)
    top = 127.0 if kind == "int8" else 448.0
    scales = blocks.abs().amax(1, keepdim=True) / top
    scaled = torch.where(scales > 0, blocks / scales, torch.zeros_like(blocks))
    codes: Any = scaled.round().clamp_(-127, 127).to(torch.int8) if kind == "int8" else scaled.to(torch.float8_e4m3fn)
    return torch.cat([codes.view(torch.uint8).reshape(-1), scales.reshape(-1).view(torch.uint8)])


def decode(raw: torch.Tensor, length: int, kind: str) -> torch.Tensor:
    """The inverse of `encode`, up to rounding."""
    codes = raw[:length].view(torch.int8 if kind == "int8" else torch.float8_e4m3fn).view(-1, BLOCK).float()
    return (codes * raw[length:].clone().view(torch.float32).view(-1, 1)).reshape(-1)


def error_bound(parts: list[torch.Tensor], kind: str) -> torch.Tensor:
    """The bound of the module docstring, per element of the flattened sum, from every rank's tensor."""
    flats = [torch.nn.functional.pad(p.reshape(-1).float(), (0, -p.numel() % BLOCK)).view(-1, BLOCK) for p in parts]
    tops = torch.stack([flat.abs().amax(1) for flat in flats])
    level = tops.sum(0)
    if kind == "int8":
        first = level / 254
        final = (torch.stack(flats).sum(0).abs().amax(1) + first) / 254
    else:
        first = level / 16
        final = (torch.stack(flats).sum(0).abs().amax(1) + first) / 16
    return ((first + final) * 1.0001).repeat_interleave(BLOCK)[: parts[0].numel()]
