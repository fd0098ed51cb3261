"""One worker process as a child of this one: started, fed its configuration, watched, ended.

A `WorkerSpec` flows in, a `WorkerStatus` flows out. A process may be started before its configuration is known: it then loads
its code, and waits. **Promises** the child ends with this process (`child`), fed or not; its
status is true at once; `stop` returns only when it is gone. **Fails when** the command cannot be started
(`StageLoadFailed`). **Called by** `LocalEngine` and, on other machines, by the Ray actor.

Children are started from one thread that lives as long as the process, because Linux ties "die with parent" to the
thread that forked.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO

from shardwise.clock import SystemClock
from shardwise.cluster.engine import LOG_LINE_CHARS, LOG_LINES, WorkerSpec, WorkerStatus
from shardwise.cluster.scheduling import UNKNOWN, Scheduling, scheduling_of
from shardwise.errors import StageLoadFailed
from shardwise.memory import resident_bytes

UNSET = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")  # tuned for other machines they slow OpenBLAS (ADR 0002)
# OpenBLAS, which numpy and llama.cpp have a copy of each, starts a thread for every core and lets it wait busily, for 50-80 ms
# of processor each. llama.cpp says itself how many it wants (`--threads`) when it multiplies; numpy multiplies nothing here.
DEFAULTS = {"OPENBLAS_NUM_THREADS": "1"}
UNSET_PREFIX = "RAY_"  # its token among them: a worker has nothing to do with Ray
_KILL_WAIT_S = 10.0
_SEEN_AGE_S = 0.25  # of what is read about a living process; reading costs some 0.2 ms


@functools.cache
def _spawner(pid: int) -> ThreadPoolExecutor:
    """One starting thread a process (a fork must not inherit its parent's)."""
    del pid
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker-spawner")


def start_child(start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Fork in the thread that lives as long as this process."""
    return _spawner(os.getpid()).submit(start).result()


class WorkerProcess:
    """A process and the pump that keeps the end of its log. `on_end` is called once, from another thread.

    With `waiting` the process is not told its configuration before `become`.
    """

    def __init__(self, spec: WorkerSpec, *, node: str, on_end: Callable[[], None] | None = None, waiting: bool = False) -> None:
        self.spec = spec
        self.node = node
        self._on_end = on_end
        self._clock = SystemClock()
        self._seen, self._seen_s = (UNKNOWN, 0), -_SEEN_AGE_S
        self._log: collections.deque[str] = collections.deque(maxlen=LOG_LINES)
        self._process = start_child(functools.partial(_spawn, spec))
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        self._stdin: IO[bytes] = self._process.stdin
        self._pump = threading.Thread(target=self._read_log, args=(self._process.stderr,), name=f"log-{spec.name}", daemon=True)
        self._pump.start()
        self._feeder: threading.Thread | None = None
        if not waiting:
            self.become(spec, node=node)

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


def _spawn(spec: WorkerSpec) -> subprocess.Popen[bytes]:
    inherited = {k: v for k, v in os.environ.items() if k not in UNSET and not k.startswith(UNSET_PREFIX)}
    environment = DEFAULTS | inherited | dict(spec.environment)
    command = [*spec.prefix, sys.executable, "-m", "shardwise.cluster.child", spec.module]
    try:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
        )
    except OSError as error:
        raise StageLoadFailed(
            f"cannot start worker {spec.name}: {error.strerror or error}", where=" ".join(command[:6]), hint="is it installed?"
        ) from error
