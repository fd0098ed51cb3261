"""Keeps one raylet running: starts it, sees it end, starts it again with growing pauses, or anew when told to.

**Promises** `alive` tells the truth within a second; `close` leaves no Ray process. **Fails when** Ray cannot start: the
reason stands in `trouble` until a try succeeds. **Called by** the daemons; acts in a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from shardwise.cluster.ray_engine.raylet import Raylet, RayletSettings
from shardwise.cluster.ray_engine.settings import RaySecurity
from shardwise.errors import AuthenticationFailed, CompatibilityError, ShardwiseError, UsageError

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
        self._thread = threading.Thread(target=self._run, name="raylet-keeper", daemon=True)
        self._thread.start()

    def restart(self) -> None:
        """End this one and start another with fresh settings."""
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
                self.pid = self._raylet.pid
                self._wait_started(self._raylet)
                self.trouble, failures = None, 0
                self._watch(self._raylet)
            except ShardwiseError as error:
                self.trouble = error
                failures += 1
            self.alive = False
            if self._raylet is not None:
                self._raylet.stop()
                self._raylet = None
            if failures:
                self._wake.wait(_PAUSES_S[min(failures, len(_PAUSES_S)) - 1])

    def _wait_started(self, raylet: Raylet) -> None:
        if not self._closed:
            raylet.wait_started()
            self.alive = not self._wake.is_set()

    def _watch(self, raylet: Raylet) -> None:
        while not self._wake.wait(_LOOK_EVERY_S):
            if not raylet.alive():
                return
