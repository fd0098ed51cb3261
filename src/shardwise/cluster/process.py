"""One worker process as a child of this one: started, fed its configuration, watched, ended.

A `WorkerSpec` flows in, a `WorkerStatus` flows out. A process may be started before its configuration is known: it then loads
its code, and waits. **Promises** the child ends with this process (`child`), fed or not; its
status is true at once; `stop` returns only when it is gone. **Fails when** the command cannot be started
(`StageLoadFailed`). **Called by** `LocalEngine` and, on other machines, by the Ray actor.
"""

from __future__ import annotations

import collections
import contextlib
import subprocess
import threading
from collections.abc import Callable
from typing import IO

from shardwise.clock import SystemClock
from shardwise.cluster.engine import LOG_LINE_CHARS, LOG_LINES, WorkerSpec, WorkerStatus
from shardwise.cluster.scheduling import UNKNOWN, Scheduling, scheduling_of
from shardwise.cluster.spawn import Process, spawn
from shardwise.errors import StageLoadFailed
from shardwise.memory import resident_bytes

_KILL_WAIT_S = 10.0
_SEEN_AGE_S = 0.25  # of what is read about a living process; reading costs some 0.2 ms


class WorkerProcess:
    """A process and the pump that keeps the end of its log. `on_end` is called once, from another thread.

    A `process` that was started already waits for its configuration until `become`.
    """

    def __init__(
        self, spec: WorkerSpec, *, node: str, on_end: Callable[[], None] | None = None, process: Process | None = None
    ) -> None:
        self.spec = spec
        self.node = node
        self._on_end = on_end
        self._clock = SystemClock()
        self._seen, self._seen_s = (UNKNOWN, 0), -_SEEN_AGE_S
        self._log: collections.deque[str] = collections.deque(maxlen=LOG_LINES)
        self._process = process or spawn(spec.name, spec.module, spec.prefix, spec.environment)
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        self._stdin: IO[bytes] = self._process.stdin
        self._pump = threading.Thread(target=self._read_log, args=(self._process.stderr,), name=f"log-{spec.name}", daemon=True)
        self._feeder: threading.Thread | None = None
        try:
            self._pump.start()
            if process is None:
                self.become(spec, node=node)
        except RuntimeError as error:  # no further thread
            self._process.kill()
            self._process.wait(timeout=_KILL_WAIT_S)
            raise StageLoadFailed(f"cannot watch worker {spec.name}: {error}", where="this process") from error

    def become(self, spec: WorkerSpec, *, node: str) -> None:
        """Give a waiting process its configuration; `can_become` said that it is the right one."""
        self.spec, self.node = spec, node
        self._feeder = threading.Thread(target=self._feed, name=f"config-{spec.name}", daemon=True)
        self._feeder.start()

    def can_become(self, spec: WorkerSpec) -> bool:
        """Whether a process for this one would have been started in the same way."""
        mine = (self.spec.module, self.spec.prefix, self.spec.environment)
        return mine == (spec.module, spec.prefix, spec.environment)

    @property
    def pid(self) -> int:
        return self._process.pid

    def status(self) -> WorkerStatus:
        """Now. The log of a dead worker is complete unless a grandchild holds it open."""
        code = self._process.poll()
        if code is not None:
            self._pump.join(timeout=0.5)
        scheduling, memory_bytes = self._observe() if code is None else (UNKNOWN, 0)
        return WorkerStatus(
            name=self.spec.name,
            node=self.node,
            pid=self.pid,
            alive=code is None,
            exit_status=code,
            log_tail="\n".join(self._log.copy()),
            memory_bytes=memory_bytes,
            scheduling=scheduling,
        )

    def _observe(self) -> tuple[Scheduling, int]:
        """Of a living process: what its system says, and the memory it has."""
        now_s = self._clock.now_s()
        if now_s - self._seen_s >= _SEEN_AGE_S:
            self._seen, self._seen_s = (scheduling_of(self.pid), resident_bytes(self.pid)), now_s
        return self._seen

    def stop(self, grace_s: float) -> None:
        """Close its input (the worker then ends by itself), then kill."""
        if self._process.poll() is None and grace_s > 0:
            if not self._is_feeding(grace_s):
                with contextlib.suppress(OSError):  # it is gone already
                    self._stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=grace_s)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(timeout=_KILL_WAIT_S)
        self._is_feeding(2.0)
        with contextlib.suppress(OSError):
            self._stdin.close()
        self._pump.join(timeout=2.0)

    def _is_feeding(self, timeout_s: float) -> bool:
        """Whether it is, still, after waiting."""
        if self._feeder is not None:
            self._feeder.join(timeout=timeout_s)
        return self._feeder is not None and self._feeder.is_alive()

    def _read_log(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                self._log.append(line.decode(errors="replace").rstrip()[:LOG_LINE_CHARS])
        self._process.wait()
        if self._on_end is not None:
            self._on_end()

    def _feed(self) -> None:
        """A configuration larger than the pipe blocks until the worker reads it: never the caller."""
        with contextlib.suppress(OSError, ValueError):  # the worker ended first: its status tells why
            self._stdin.write(len(self.spec.config).to_bytes(8, "little") + self.spec.config)
            self._stdin.flush()
