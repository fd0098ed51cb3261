"""Keeps one raylet running: starts it, sees it end, starts it again with growing pauses, or anew when told to.

**Promises** `alive` tells the truth within a second; `close` leaves no Ray process. **Fails when** Ray cannot start: the
reason stands in `trouble` until a try succeeds. **Called by** the daemons; acts in a thread of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from shardwise.cluster.ray_engine.head import HeadNews
from shardwise.cluster.ray_engine.raylet import Raylet, RayletSettings
from shardwise.cluster.ray_engine.settings import RaySecurity
from shardwise.errors import AuthenticationFailed, CompatibilityError, ShardwiseError, UsageError

log = logging.getLogger(__name__)
_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0)
_LOOK_EVERY_S = 0.3


def is_fatal(error: ShardwiseError | None) -> bool:
    """Whether trying again cannot help."""
    return isinstance(error, UsageError | AuthenticationFailed | CompatibilityError)


class RayletKeeper:
    """`make` gives the settings for the next start (a new address, a new token, one start more)."""

    def __init__(self, make: Callable[[], tuple[RayletSettings, RaySecurity]]) -> None:
        self._make = make
        self._wake = threading.Event()
        self._closed = False
        self._raylet: Raylet | None = None
        self.trouble: ShardwiseError | None = None
        self.alive = False
        self.pid = 0
        self.start = 0  # which start of this node's raylet it is, ever
        self._thread = threading.Thread(target=self._run, name="raylet-keeper", daemon=True)
        self._thread.start()

    @property
    def news(self) -> HeadNews:
        """What Ray's head says, where this raylet is the head's; also while that starts."""
        raylet = self._raylet
        return raylet.news if raylet is not None else HeadNews()

    def restart(self) -> None:
        """End this one, also while it starts, and start another with fresh settings."""
        self.alive = False
        self._wake.set()

    def close(self) -> None:
        """End it for good."""
        self._closed = True
        self._wake.set()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        failures = 0
        while not self._closed:
            self._wake.clear()
            try:
                settings, security = self._make()
                self._raylet = Raylet(settings, security)
                self.pid, self.start = self._raylet.pid, settings.incarnation
                self.alive = self._raylet.wait_started(self._wake)
                self.trouble, failures = None, 0
                log.info("Ray runs (start %d)", self.start)
                self._watch(self._raylet)
                log.info("Ray %s", "ends" if self._wake.is_set() else f"ended: {self._raylet.log_tail()}")
            except ShardwiseError as error:
                log.warning("Ray does not run: %s", error.one_line())
                self.trouble = error
                failures += 1
            self.alive = False
            if self._raylet is not None:
                self._raylet.stop()
                self._raylet = None
            if failures:
                self._wake.wait(_PAUSES_S[min(failures, len(_PAUSES_S)) - 1])

    def _watch(self, raylet: Raylet) -> None:
        while not self._wake.wait(_LOOK_EVERY_S):
            if not raylet.alive():
                return
