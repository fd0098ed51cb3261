"""Starts the processes that become workers, and knows how to start them before anything else is loaded.

module, command in front, environment -> a process with pipes for its configuration and its log. This module imports little: a
launch begins with it (docs/adr/0045-quick-start.md). **Promises** children are started from one thread that lives as long as
this process, because Linux ties "die with parent" to the thread that forked. **Fails with** `StageLoadFailed` where the
command cannot be started. **Called by** `process`, `local`, and `deploy.launcher`.
"""

from __future__ import annotations

import functools
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from shardwise.errors import StageLoadFailed

STAGE_MODULE = "shardwise.stage"
UNSET = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")  # tuned for other machines they slow OpenBLAS (ADR 0002)
# OpenBLAS, which numpy and llama.cpp have a copy of each, starts a thread for every core and lets it wait busily, for 50-80 ms
# of processor each. llama.cpp says itself how many it wants (`--threads`) when it multiplies; numpy multiplies nothing here.
DEFAULTS = {"OPENBLAS_NUM_THREADS": "1"}
UNSET_PREFIX = "RAY_"  # its token among them: a worker has nothing to do with Ray
_KILL_WAIT_S = 10.0

Process = subprocess.Popen[bytes]


class _Spawner:
    """A thread that starts children, and lives as long as the process: an executor's ends with the main thread."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Process], Future[Process]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="worker-spawner", daemon=True).start()

    def start(self, start: Callable[[], Process]) -> Process:
        future: Future[Process] = Future()
        self._jobs.put((start, future))
        return future.result()

    def _serve(self) -> None:
        while True:
            start, future = self._jobs.get()
            try:
                future.set_result(start())
            except Exception as error:  # noqa: BLE001  # it is the caller's
                future.set_exception(error)
            del start, future


@functools.cache
def _spawner(pid: int) -> _Spawner:
    """One a process (a fork must not inherit its parent's)."""
    del pid
    return _Spawner()


def start_child(start: Callable[[], Process]) -> Process:
    """Fork in the thread that lives as long as this process."""
    return _spawner(os.getpid()).start(start)


def spawn(
    name: str, module: str = STAGE_MODULE, prefix: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Process:
    """A process that loads the module's code, then waits for its configuration on standard input."""
    inherited = {k: v for k, v in os.environ.items() if k not in UNSET and not k.startswith(UNSET_PREFIX)}
    variables = DEFAULTS | inherited | dict(environment or {})
    command = [*prefix, sys.executable, "-m", "shardwise.cluster.child", module]
    pipe = subprocess.PIPE
    # A group of its own: a terminal's Ctrl-C is the driver's to handle, and would reach a worker before it could ignore it.
    more: dict[str, Any] = {} if os.name == "nt" else {"process_group": 0}
    try:
        return start_child(lambda: Process(command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, env=variables, **more))
    except OSError as error:
        raise StageLoadFailed(
            f"cannot start worker {name}: {error.strerror or error}", where=" ".join(command[:6]), hint="is it installed?"
        ) from error
    except RuntimeError as error:  # no further thread, for example
        raise StageLoadFailed(f"cannot start worker {name}: {error}", where="this process") from error


class Ahead:
    """Stage workers' processes, started before anybody has looked what they are for. Those not taken end with the block."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._processes: list[Process] = []

    def __enter__(self) -> Ahead:
        try:
            for number in range(self._num_workers):
                self._processes.append(spawn(f"ahead-{number}"))
        except BaseException:
            self._end()
            raise
        return self

    def take(self) -> list[Process]:
        """All of them; they belong to the caller now."""
        taken, self._processes = self._processes, []
        return taken

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        left = self.take()
        for process in left:
            process.kill()
        for process in left:
            process.wait(timeout=_KILL_WAIT_S)
            for stream in (process.stdin, process.stderr):
                if stream is not None:
                    stream.close()
