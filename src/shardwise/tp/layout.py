"""Which global indices of a tensor each rank holds: the one record that makes gather, save and re-shard exact.

A dimension of size N is cut by a `Partition`: for each rank a list of `Piece(start, length)` in local order. Pieces of
one rank need not be contiguous (packed projections, experts), two ranks may hold the same indices (replicated KV heads),
and a piece with start -1 stands for zeros that belong to nobody (a rank that holds no head computes on one zero head).
`ShardLayout` is a global shape plus at most one cut dimension.

What can fail: a partition that leaves an index without an owner (`UsageError`, a bug of a user-written style), a local
tensor of another shape than the layout says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from shardwise.errors import UsageError

ZEROS = -1
"""`start` of a piece that holds zeros instead of global indices."""


class Piece(NamedTuple):
    """`length` consecutive global indices from `start`, or that many zeros where `start` is -1."""

    start: int
    length: int


def joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The same indices with neighbours merged and empty pieces dropped."""
    out: list[Piece] = []
    for piece in pieces:
        if piece.length == 0:
            continue
        if out and piece.start != ZEROS and out[-1].start != ZEROS and out[-1].start + out[-1].length == piece.start:
            out[-1] = Piece(out[-1].start, out[-1].length + piece.length)
        elif out and piece.start == ZEROS and out[-1].start == ZEROS:
            out[-1] = Piece(ZEROS, out[-1].length + piece.length)
        else:
            out.append(piece)
    return tuple(out)


@dataclass(frozen=True)
class Partition:
    """How `size` indices are spread over ranks; `parts[rank]` in local order."""

    size: int
    parts: tuple[tuple[Piece, ...], ...]

    @property
    def degree(self) -> int:
        return len(self.parts)

    @cached_property
    def local_sizes(self) -> tuple[int, ...]:
        """Number of local indices of each rank, zeros included."""
        return tuple(sum(piece.length for piece in part) for part in self.parts)

    @cached_property
    def is_contiguous(self) -> bool:
        """Each rank holds one run, and the runs follow each other in rank order without overlap."""
        position = 0
        for part in self.parts:
            for piece in part:
                if piece.start != position:
                    return False
                position += piece.length
        return position == self.size

    @cached_property
    def has_copies(self) -> bool:
        """Some index is held more than once."""
        held = sum(piece.length for part in self.parts for piece in part if piece.start != ZEROS)
        return held > self.size

    def indices(self, rank: int) -> list[int]:
        """The global index of each local position; -1 for zeros."""
        out: list[int] = []
        for start, length in self.parts[rank]:
            out.extend([ZEROS] * length if start == ZEROS else range(start, start + length))
        return out

    def scaled(self, numerator: int, denominator: int = 1) -> Partition:
        """The partition of a dimension `numerator / denominator` times as long (heads -> features, rows -> quantization
        blocks). Raises UsageError where a cut would fall inside a block."""

        def scale(value: int) -> int:
            if value * numerator % denominator:
                raise UsageError(f"a cut at {value} falls inside a block of {denominator}", hint="give the rule a `unit`")
            return value * numerator // denominator

        parts = tuple(
            tuple(Piece(start if start == ZEROS else scale(start), scale(length)) for start, length in part)
            for part in self.parts
        )
        return Partition(scale(self.size), parts)

    def checked(self) -> Partition:
        """Itself, if every index has an owner."""
        covered = bytearray(self.size)
        for part in self.parts:
            for start, length in part:
                if start != ZEROS:
                    covered[start : start + length] = b"\1" * length
        if covered.count(0):
            raise UsageError(f"index {covered.index(0)} of {self.size} is held by no rank")
        return self


def concatenated(partitions: Sequence[Partition]) -> Partition:
    """Partitions of consecutive blocks as one partition of the whole: rank r holds its part of block 0, then of block 1 ..."""
    parts: list[list[Piece]] = [[] for _ in range(partitions[0].degree)]
    offset = 0
    for block in partitions:
        for rank, part in enumerate(block.parts):
            parts[rank] += [Piece(p.start if p.start == ZEROS else p.start + offset, p.length) for p in part]
        offset += block.size
    return Partition(offset, tuple(joined(part) for part in parts))


Reader = Callable[[int, int, int], torch.Tensor]
"""`(dim, start, stop) -> tensor`: reads one run of indices along a dimension from wherever the tensor is."""


@dataclass(frozen=True)
class ShardLayout:
    """One parameter over the ranks: the global `shape`, and the partition of dimension `dim` (None: every rank holds all)."""

    shape: tuple[int, ...]
    dim: int | None = None
    partition: Partition | None = None

    def local_shape(self, rank: int) -> tuple[int, ...]:
        if self.dim is None or self.partition is None:
            return self.shape
        return (*self.shape[: self.dim], self.partition.local_sizes[rank], *self.shape[self.dim + 1 :])

    def local_numel(self, rank: int) -> int:
        total = 1
        for size in self.local_shape(rank):
            total *= size
        return total

    def take(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """This rank's part of the full tensor: a new, contiguous tensor that shares no memory with it."""
        if self.dim is None:
            return full.clone(memory_format=torch.contiguous_format)
        return self.read(lambda dim, start, stop: full.narrow(dim, start, stop - start), rank, full.dtype, full.device)

    def read(self, reader: Reader, rank: int, dtype: torch.dtype, device: Any = "cpu", *, mapped: bool = False) -> torch.Tensor:
        """This rank's part, piece by piece: each piece is read, then cast, so one piece is all that is held beside the result.

        mapped: what is one contiguous run of the right type is given as the reader gave it (a view of a mapped file)."""
        if mapped and (whole := self._as_read(reader, rank)) is not None and whole.dtype == dtype and whole.is_contiguous():
            return whole.to(device)
        out = torch.empty(self.local_shape(rank), dtype=dtype, device=device)
        if self.dim is None or self.partition is None:
            out.copy_(reader(0, 0, self.shape[0] if self.shape else 1))
            return out
        position = 0
        for start, length in self.partition.parts[rank]:
            window = out.narrow(self.dim, position, length)
            if start == ZEROS:
                window.zero_()
            else:
                window.copy_(reader(self.dim, start, start + length))
            position += length
        return out

    def _as_read(self, reader: Reader, rank: int) -> torch.Tensor | None:
        if self.dim is None or self.partition is None:
            return reader(0, 0, self.shape[0]) if self.shape else None
        pieces = self.partition.parts[rank]
        if len(pieces) != 1 or pieces[0].start == ZEROS or self.dim != 0:
            return None
        return reader(0, pieces[0].start, pieces[0].start + pieces[0].length)

    def put(self, full: torch.Tensor, local: torch.Tensor, rank: int) -> None:
        """Write a rank's local tensor into the full one. Copies of an index are equal by contract; the last writer wins."""
        if tuple(local.shape) != self.local_shape(rank):
            raise UsageError(f"rank {rank} holds {tuple(local.shape)}, the layout says {self.local_shape(rank)}")
        if self.dim is None or self.partition is None:
            full.copy_(local)
            return
        position = 0
        for start, length in self.partition.parts[rank]:
            if start != ZEROS:
                full.narrow(self.dim, start, length).copy_(local.narrow(self.dim, position, length))
            position += length

    def assemble(self, locals_by_rank: Sequence[torch.Tensor]) -> torch.Tensor:
        """The full tensor from every rank's part, bit for bit."""
        first = locals_by_rank[0]
        full = torch.empty(self.shape, dtype=first.dtype, device=first.device)
        for rank in range(len(locals_by_rank) - 1, -1, -1):
            self.put(full, locals_by_rank[rank], rank)
        return full

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a JSON file."""
        if self.dim is None or self.partition is None:
            return {"shape": list(self.shape)}
        return {"shape": list(self.shape), "dim": self.dim, "parts": [[list(p) for p in part] for part in self.partition.parts]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ShardLayout:
        shape = tuple(int(s) for s in data["shape"])
        if data.get("dim") is None:
            return cls(shape)
        dim = int(data["dim"])
        parts = tuple(tuple(Piece(int(s), int(n)) for s, n in part) for part in data["parts"])
        return cls(shape, dim, Partition(shape[dim], parts))
