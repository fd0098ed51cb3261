"""Ranks as threads of one process: the same `Collectives` contract without processes or sockets.

Plan inference and dry runs use it (`simulate`): one copy of a module per rank, each in its own thread, really split, really
summed. Promises: sums in rank order, the same bits on every rank. Fails when: a rank raises; the others then get `PeerClosed`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from shardwise.errors import PeerClosed, ReplyTimeout
from shardwise.tp.collectives import Collectives

Result = TypeVar("Result")


class ThreadHub:
    """The meeting point of `size` ranks in one process."""

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self._barrier = threading.Barrier(size)
        self._slots: list[Any] = [None] * size
        self._mail: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {
            (source, target): queue.Queue() for source in range(size) for target in range(size)
        }

    def swap(self, rank: int, value: Any) -> list[Any]:
        """Everybody's value, by rank."""
        self._slots[rank] = value
        self._wait()
        values = list(self._slots)
        self._wait()
        return values

    def mail(self, source: int, target: int) -> queue.Queue[torch.Tensor]:
        """The letter box from one rank to another."""
        return self._mail[source, target]

    def break_up(self) -> None:
        """Release everybody who waits, with an error."""
        self._barrier.abort()

    def _wait(self) -> None:
        try:
            self._barrier.wait(self.timeout_s)
        except threading.BrokenBarrierError as error:
            raise PeerClosed("a rank of the group is gone", where="ranks as threads") from error


class ThreadCollectives(Collectives):
    """One rank of a `ThreadHub`."""

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        super().__init__(rank, hub.size)
        self.hub = hub

    def _sum(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        parts = self.hub.swap(self.rank, x.detach().clone())
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return lambda: total

    def _gather_equal(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [part.clone() for part in self.hub.swap(self.rank, flat.detach().clone())]

    def _exchange_equal(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([part[self.rank] for part in self.hub.swap(self.rank, rows.detach().clone())])

    def _broadcast(self, x: torch.Tensor, source: int) -> None:
        value = self.hub.swap(self.rank, x.detach().clone())[source]
        if self.rank != source:
            x.copy_(value)

    def send(self, x: torch.Tensor, target: int) -> None:
        self.hub.mail(self.rank, target).put(x.detach().clone())

    def receive(self, x: torch.Tensor, source: int) -> None:
        try:
            x.copy_(self.hub.mail(source, self.rank).get(timeout=self.hub.timeout_s))
        except queue.Empty as error:
            raise ReplyTimeout("a rank sent nothing", where="ranks as threads") from error


def run_ranks(size: int, work: Callable[[ThreadCollectives], Result], *, timeout_s: float = 60.0) -> list[Result]:
    """Run `work` once per rank, each in a thread, and give the results by rank. The first rank's error is raised."""
    hub = ThreadHub(size, timeout_s)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def body(rank: int) -> None:
        try:
            results[rank] = work(ThreadCollectives(hub, rank))
        except BaseException as error:  # noqa: BLE001 - handed to the caller below
            errors[rank] = error
            hub.break_up()

    threads = [threading.Thread(target=body, args=(rank,), name=f"tp-rank-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s * 4)
    if any(thread.is_alive() for thread in threads):
        raise ReplyTimeout("a rank did not finish", where="ranks as threads")
    _raise_first(errors)
    return results


def _raise_first(errors: Sequence[BaseException | None]) -> None:
    """The error that started it rather than the `PeerClosed` of those who waited."""
    real = [error for error in errors if error is not None and not isinstance(error, PeerClosed)]
    others = [error for error in errors if error is not None]
    for error in real or others:
        raise error
