"""From the deployment's driver threads into the event loop, in order, with one wake-up for whatever has come since the last.

**Promises:** every event reaches its receiver once and in order, events of one receiver that came together in one call; posting
never blocks and never raises; a receiver that breaks is logged and leaves the others alone. **Fails when:** the loop is closed;
then events are dropped, since nobody is left to read them. **Called by:** `Generation`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass
from typing import Protocol

from shardwise.clock import Clock
from shardwise.server.engine import Event
from shardwise.transport.promptness import prefer_promptness

BURST_S = 0.003  # a step's tokens of a crowd
log = logging.getLogger("shardwise.server")


@dataclass(frozen=True, slots=True)
class Arrived:
    """An event, which choice it belongs to, and when the driver gave it out."""

    choice: int
    event: Event
    at_s: float


class Receiver(Protocol):
    """Who gets events, in the loop."""

    def take(self, arrived: list[Arrived]) -> None: ...


class Bridge:
    """One a server."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._pending: dict[Receiver, list[Arrived]] = {}

    def arrived(self, choice: int, event: Event) -> Arrived:
        """With the time of this moment. The thread that brings the first one asks for time to write a whole step's tokens."""
        if not hasattr(self._thread, "asked"):
            self._thread.asked = prefer_promptness(BURST_S)
        return Arrived(choice, event, self._clock.now_s())

    def post(self, receiver: Receiver, arrived: Arrived) -> None:
        """Called from any thread."""
        with self._lock:
            wake = not self._pending
            self._pending.setdefault(receiver, []).append(arrived)
        if wake and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # closed in between
                return

    def _deliver(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
        for receiver, arrived in pending.items():
            try:
                receiver.take(arrived)
            except Exception:
                log.exception("a stream broke")
