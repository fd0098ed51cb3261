"""A lock between processes that the system itself releases when its holder dies.

**Promises** one holder at a time on this machine; a crashed holder never blocks anybody. **Fails when** the lock is not
free within the deadline (`UsageError`). **Called by** the store. Not for network file systems.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

from shardwise.clock import Clock, SystemClock
from shardwise.errors import UsageError

_POLL_S = 0.05


class FileLock:
    """An exclusive lock on a file; the file stays."""

    def __init__(self, path: Path, *, timeout_s: float = 0.0, what: str = "", clock: Clock | None = None) -> None:
        self.path = path
        self._timeout_s = timeout_s
        self._what = what or f"'{path.name}'"
        self._clock = clock or SystemClock()
        self._handle: int | None = None

    def try_acquire(self) -> bool:
        """Take it if it is free."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        if not _lock(handle):
            os.close(handle)
            return False
        self._handle = handle
        return True

    def release(self) -> None:
        """Give it back; harmless if it is not held."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> FileLock:
        deadline_s = self._clock.now_s() + self._timeout_s
        while not self.try_acquire():
            if self._clock.now_s() >= deadline_s:
                raise UsageError(
                    f"another process works on {self._what}", where=str(self.path), hint="wait for it, or stop that process"
                )
            self._clock.sleep(_POLL_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> bool:
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _lock(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True
