"""LocalEngine: workers as child processes of this one.

**Promises** children die with their parent, even on SIGKILL (their standard input closes, and on Linux the kernel
signals them); a crash is seen at once and carries exit status and the last lines of the log. **Fails when** the
interpreter cannot be started (`StageLoadFailed`). **Called by** `deploy`.
"""

from __future__ import annotations

import collections
import contextlib
import os
import subprocess
import sys
import threading
from typing import IO

from shardwise.cluster.engine import WorkerSpec, WorkerStatus
from shardwise.errors import StageLoadFailed

LOG_LINES = 60
UNSET = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")  # tuned for other machines they slow OpenBLAS (ADR 0002)


class _Child:
    """A process and the pump that keeps the end of its log."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        environment = {k: v for k, v in os.environ.items() if k not in UNSET} | dict(spec.environment)
        command = [*spec.prefix, sys.executable, "-m", "shardwise.stage"]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment,
            )
        except OSError as error:
            raise StageLoadFailed(f"cannot start worker {spec.name}: {error}", where=" ".join(command)) from error
        self.log: collections.deque[str] = collections.deque(maxlen=LOG_LINES)
        assert self.process.stdin is not None
        assert self.process.stderr is not None
        self.stdin: IO[bytes] = self.process.stdin
        self.pump = threading.Thread(target=self._pump, args=(self.process.stderr,), name=f"log-{spec.name}", daemon=True)
        self.pump.start()
        try:
            self.stdin.write(len(spec.config).to_bytes(8, "little") + spec.config)
            self.stdin.flush()
        except BrokenPipeError:
            self.process.wait(timeout=5)  # the status tells why

    def _pump(self, stream: IO[bytes]) -> None:
        for line in stream:
            self.log.append(line.decode(errors="replace").rstrip())
        stream.close()

    def status(self) -> WorkerStatus:
        code = self.process.poll()
        if code is not None:
            self.pump.join(timeout=1.0)
        return WorkerStatus(
            name=self.spec.name,
            node=self.spec.node or "local",
            pid=self.process.pid,
            alive=code is None,
            exit_status=code,
            log_tail="\n".join(self.log),
        )

    def stop(self, grace_s: float) -> None:
        """Close its input (the worker then ends by itself), then terminate, then kill."""
        with contextlib.suppress(BrokenPipeError):  # it is gone already
            self.stdin.close()
        try:
            self.process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=10)
        self.pump.join(timeout=2.0)


class LocalEngine:
    """Workers on this machine."""

    def __init__(self) -> None:
        self._children: dict[str, _Child] = {}

    def start(self, spec: WorkerSpec) -> None:
        old = self._children.get(spec.name)
        if old is not None:
            old.stop(grace_s=0.0)
        self._children[spec.name] = _Child(spec)

    def stop(self, name: str, *, grace_s: float = 2.0) -> None:
        child = self._children.pop(name, None)
        if child is not None:
            child.stop(grace_s)

    def status(self, name: str) -> WorkerStatus:
        return self._children[name].status()

    def statuses(self) -> list[WorkerStatus]:
        return [child.status() for child in self._children.values()]

    def nodes(self) -> list[str]:
        return ["local"]

    def close(self) -> None:
        for name in list(self._children):
            self.stop(name)
