"""The seam to whatever carries tensors between ranks. Data flow: plain tensors in, plain tensors out, no autograd here.

Promises: every method is called by all ranks of the group in the same order; sums are the same bits on every rank;
`all_gather` and `reduce_scatter` take ranks of different sizes. `stats` counts calls and the bytes each rank
hands over.
Fails when: a rank is gone (`PeerClosed`), a collective outlasts the group's timeout (`ReplyTimeout`).
Called by: `functional` (forward and backward), `gather`, `checkpoint`, `sampling`, `agreement`.

Implementations: `LoneCollectives` (one rank), `DistCollectives` (any torch process group: gloo, NCCL, XCCL, Neuron),
`StagedCollectives` (through CPU memory, for devices whose backend is missing and for mixed groups) here;
`threads.ThreadCollectives` (ranks as threads of one process: dry runs and plan inference); `compression.Compressed` wraps
any of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import NetworkError, PeerClosed, ReplyTimeout, UsageError

_GONE = ("closed by peer", "reset by peer", "broken pipe", "connection refused", "connection closed", "aborted", "socket closed")

BACKEND_DEVICES = {"nccl": "cuda", "xccl": "xpu", "ccl": "xpu", "neuron": "neuron"}


@dataclass
class CollectiveStats:
    """Calls and bytes (of the tensor a rank hands over) by kind of collective."""

    calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)

    def record(self, kind: str, num_bytes: int) -> None:
        self.calls[kind] += 1
        self.sent_bytes[kind] += num_bytes

    def clear(self) -> None:
        self.calls.clear()
        self.sent_bytes.clear()


class Collectives(ABC):
    """See the module docstring. Subclasses bring four primitives on equal sizes; the uneven ones are built here."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.stats = CollectiveStats()
        self.numbers: dict[str, int] = {}
        """Registered moves by kind, for compiled graphs (see `compiled`)."""

    @property
    def device(self) -> torch.device:
        """Where small tensors of our own must live to travel: a GPU backend takes no CPU tensors."""
        return torch.device("cpu")

    def __deepcopy__(self, memo: dict[int, Any]) -> Collectives:
        return self  # a copied model talks over the same group

    @abstractmethod
    def _sum(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start summing the contiguous `x` in place; the returned call waits and gives the sum."""

    @abstractmethod
    def _gather_equal(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's 1-D tensor of one common length, by rank."""

    @abstractmethod
    def _exchange_equal(self, rows: torch.Tensor) -> torch.Tensor:
        """rows[r] goes to rank r; out[r] came from rank r. Shape (size, length)."""

    @abstractmethod
    def _broadcast(self, x: torch.Tensor, source: int) -> None:
        """In place on a contiguous tensor."""

    @abstractmethod
    def send(self, x: torch.Tensor, target: int) -> None:
        """Hand a contiguous tensor to one rank, which calls `receive`; the others are not involved."""

    @abstractmethod
    def receive(self, x: torch.Tensor, source: int) -> None:
        """Fill `x` with what rank `source` sends."""

    def start_all_reduce(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Like `all_reduce`, but returns at once; the returned call waits for the sum."""
        if self.size == 1 or x.numel() == 0:
            return lambda: x
        self.stats.record("all_reduce", x.numel() * x.element_size())
        return self._sum(x if x.is_contiguous() else x.contiguous())

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks; may reuse the memory of `x`."""
        return self.start_all_reduce(x)()

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        """The maximum over ranks (small tensors: one all-gather)."""
        if self.size == 1 or x.numel() == 0:
            return x
        return torch.stack(self.all_gather(x.reshape(1, -1), [1] * self.size, 0)).amax(0).view(x.shape)

    def all_gather(self, x: torch.Tensor, sizes: Sequence[int], dim: int) -> list[torch.Tensor]:
        """Every rank's tensor, by rank. Shapes agree but for `dim`, where rank r has `sizes[r]`."""
        if self.size == 1:
            return [x]
        shapes = [(*x.shape[: dim % x.dim()], size, *x.shape[dim % x.dim() + 1 :]) for size in sizes]
        numels = [_numel(shape) for shape in shapes]
        longest = max(numels)
        if longest == 0:
            return [x.new_empty(shape) for shape in shapes]
        self.stats.record("all_gather", x.numel() * x.element_size())
        flat = _padded(x.reshape(-1), longest)
        return [part[:numel].view(shape) for part, numel, shape in zip(self._gather_equal(flat), numels, shapes, strict=True)]

    def reduce_scatter(self, x: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        """The sum over ranks, of which this rank keeps its run of `sizes[rank]` along `dim`. Summed in rank order."""
        if self.size == 1:
            return x
        parts = torch.split(x, list(sizes), dim)
        longest = max(part.numel() for part in parts)
        if longest == 0:
            return parts[self.rank]
        self.stats.record("reduce_scatter", x.numel() * x.element_size())
        rows = torch.stack([_padded(part.reshape(-1), longest) for part in parts])
        total = self._exchange_equal(rows).sum(0)
        return total[: parts[self.rank].numel()].view(parts[self.rank].shape)

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """The tensor of rank `source`, written into `x` elsewhere."""
        if self.size > 1 and x.numel():
            self.stats.record("broadcast", x.numel() * x.element_size())
            self._broadcast(x, source)
        return x

    def gather_bytes(self, x: torch.Tensor, sizes: Sequence[int], dim: int) -> list[torch.Tensor]:
        """`all_gather` for any dtype, by its bytes: no value passes through arithmetic."""
        raw = x.contiguous().view(-1).view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)
        shapes = [(*x.shape[: dim % x.dim()], size, *x.shape[dim % x.dim() + 1 :]) for size in sizes]
        parts = self.all_gather(raw, [_numel(shape) * x.element_size() for shape in shapes], 0)
        return [part.contiguous().view(x.dtype).view(shape) for part, shape in zip(parts, shapes, strict=True)]


class LoneCollectives(Collectives):
    """One rank: everything is the identity, nothing is counted."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def _sum(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: x

    def _gather_equal(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat]

    def _exchange_equal(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def _broadcast(self, x: torch.Tensor, source: int) -> None:
        return None

    def send(self, x: torch.Tensor, target: int) -> None:
        raise UsageError("a single rank has nobody to send to")

    def receive(self, x: torch.Tensor, source: int) -> None:
        raise UsageError("a single rank has nobody to receive from")


class DistCollectives(Collectives):
    """A torch process group, called directly (no DTensor, no functional wrappers)."""

    def __init__(self, group: Any) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group = group

    @property
    def device(self) -> torch.device:
        kind = BACKEND_DEVICES.get(str(dist.get_backend(self.group)), "cpu")
        return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())

    def _sum(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        with mapped_errors():
            work = self.group.allreduce([x])

        def finish() -> torch.Tensor:
            with mapped_errors():
                work.wait()
            return x

        return finish

    def _gather_equal(self, flat: torch.Tensor) -> list[torch.Tensor]:
        out = [torch.empty_like(flat) for _ in range(self.size)]
        with mapped_errors():
            self.group.allgather([out], [flat]).wait()
        return out

    def _exchange_equal(self, rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(rows)
        with mapped_errors():
            self.group.alltoall_base(out, rows, [], []).wait()
        return out

    def _broadcast(self, x: torch.Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        with mapped_errors():
            self.group.broadcast([x], options).wait()

    def send(self, x: torch.Tensor, target: int) -> None:
        if x.numel():
            self.stats.record("send", x.numel() * x.element_size())
            with mapped_errors():
                self.group.send([x], target, 0).wait()

    def receive(self, x: torch.Tensor, source: int) -> None:
        if x.numel():
            with mapped_errors():
                self.group.recv([x], source, 0).wait()


class StagedCollectives(DistCollectives):
    """Through CPU memory over a gloo group: for MPS, for mixed groups, for any device without a backend of its own."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def _sum(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        finish = super()._sum(x.to("cpu", copy=True))
        return lambda: x.copy_(finish())

    def _gather_equal(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [part.to(flat.device) for part in super()._gather_equal(flat.cpu())]

    def _exchange_equal(self, rows: torch.Tensor) -> torch.Tensor:
        return super()._exchange_equal(rows.cpu()).to(rows.device)

    def _broadcast(self, x: torch.Tensor, source: int) -> None:
        staged = x.to("cpu", copy=True)
        super()._broadcast(staged, source)
        x.copy_(staged)

    def send(self, x: torch.Tensor, target: int) -> None:
        super().send(x.cpu(), target)

    def receive(self, x: torch.Tensor, source: int) -> None:
        staged = torch.empty_like(x, device="cpu")
        super().receive(staged, source)
        x.copy_(staged)


@contextmanager
def mapped_errors() -> Iterator[None]:
    """A lost peer or a timeout in a collective as this project's errors; anything else passes unchanged."""
    try:
        yield
    except RuntimeError as error:
        raise _as_network_error(error) or error from error


def _as_network_error(error: RuntimeError) -> NetworkError | None:
    if isinstance(error, NetworkError):
        return error
    text = str(error)
    line = text.strip().splitlines()[0][:200] if text.strip() else type(error).__name__
    hint = "restart the group; every rank must be alive for a collective"
    if "timed out" in text.lower() or "timeout" in text.lower():
        return ReplyTimeout(f"a collective timed out: {line}", where="tensor-parallel group", hint=hint)
    if any(sign in text.lower() for sign in _GONE):
        return PeerClosed(f"a rank of the group is gone: {line}", where="tensor-parallel group", hint=hint)
    return None


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _padded(flat: torch.Tensor, length: int) -> torch.Tensor:
    if flat.numel() == length:
        return flat.contiguous()
    out = flat.new_zeros(length)
    out[: flat.numel()] = flat
    return out
