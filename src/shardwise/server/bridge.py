"""From the deployment's driver threads into the event loop, in order, with one wake-up for whatever has come since the last.

**Promises:** every event reaches its sink once and in order; posting never blocks and never raises. **Fails when:** the loop is
closed; then events are dropped, since nobody is left to read them. **Called by:** `Generation`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.clock import Clock
from shardwise.server.engine import Event


@dataclass(frozen=True, slots=True)
class Arrived:
    """An event, which choice it belongs to, and when the driver gave it out."""

    choice: int
    event: Event
    at_s: float


class Bridge:
    """One a server."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._lock = threading.Lock()
        self._pending: list[tuple[Callable[[Arrived], None], Arrived]] = []

    def post(self, sink: Callable[[Arrived], None], choice: int, event: Event) -> None:
        """Called from any thread."""
        arrived = Arrived(choice, event, self._clock.now_s())
        with self._lock:
            wake = not self._pending
            self._pending.append((sink, arrived))
        if wake and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # closed in between
                return

    def _deliver(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, []
        for sink, arrived in pending:
            sink(arrived)
