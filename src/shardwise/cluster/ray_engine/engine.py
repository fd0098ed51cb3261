"""RayEngine: the `ClusterEngine` over the machines of a Ray cluster.

**Promises** the contract of `ClusterEngine`; a worker's death is known within `detect_s`, a node's within about ten
seconds (settings.py). If Ray's head is gone for good, all workers are dead with that reason, and the engine attaches
again by itself as soon as a head answers. **Fails when** no cluster answers or it refuses (`ConnectFailed`,
`AuthenticationFailed`, `CompatibilityError`), and as `ClusterEngine` says. **Called by** `deploy`.

All of Ray runs in a broker process (broker.py); this module imports none of it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO

from shardwise.clock import SystemClock
from shardwise.cluster.engine import NodeInfo, WorkerSpec, WorkerStatus, unknown_worker
from shardwise.cluster.ray_engine.frames import (
    Answer,
    AnyFrame,
    Attach,
    Broken,
    FailureNote,
    Report,
    StartWorker,
    StopWorker,
    read_frame,
    write_frame,
)
from shardwise.cluster.ray_engine.settings import RayAddress, RaySecurity, ray_environment, require_supported_ray
from shardwise.cluster.spawn import start_child
from shardwise.errors import ConnectFailed, PeerClosed, ReplyTimeout, ShardwiseError, StageLoadFailed
from shardwise.records import replace

_ANSWER_TIMEOUT_S = 90.0
_REATTACH_AFTER_S = (0.5, 1.0, 2.0, 4.0)
_BROKER = ("-m", "shardwise.cluster.ray_engine.broker")


class RayEngine:
    """Workers on the nodes of a Ray cluster. The machine that runs this must be one of them."""

    def __init__(self, where: Callable[[], tuple[RayAddress, RaySecurity]], *, attach_timeout_s: float = 60.0) -> None:
        """`where` is asked before each attachment: a cluster may get another address or token."""
        require_supported_ray()
        self._where = where
        self._address, _ = where()
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._requests = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[Answer]] = {}
        self._nodes: tuple[NodeInfo, ...] = ()
        self._statuses: dict[str, WorkerStatus] = {}
        self._attached = threading.Event()
        self._why_not: ShardwiseError | None = None
        self._broker: _BrokerProcess | None = None
        self._clock = SystemClock()
        self._keeper = threading.Thread(target=self._keep_attached, name="ray-broker", daemon=True)
        self._keeper.start()
        self._wait_attached(attach_timeout_s)

    @property
    def detect_s(self) -> float:
        return 1.0

    def start(self, spec: WorkerSpec) -> None:
        self._ask(StartWorker(request=next(self._requests), spec=spec))

    def stop(self, name: str, *, grace_s: float = 2.0) -> None:
        with self._lock:
            if not self._attached.is_set():  # its workers are gone already
                self._statuses.pop(name, None)
                return
        self._ask(StopWorker(request=next(self._requests), name=name, grace_s=grace_s))

    def status(self, name: str) -> WorkerStatus:
        with self._lock:
            if name not in self._statuses:
                raise unknown_worker(name, list(self._statuses))
            return self._statuses[name]

    def statuses(self) -> list[WorkerStatus]:
        with self._lock:
            return list(self._statuses.values())

    def nodes(self) -> list[str]:
        return [info.name for info in self.node_infos()]

    def node_infos(self) -> list[NodeInfo]:
        with self._lock:
            return list(self._nodes)

    def close(self) -> None:
        """End the broker; Ray then ends the actors, and these their workers."""
        if not self._closed.is_set():
            for status in self.statuses():
                with contextlib.suppress(ShardwiseError):  # a node that is gone took its workers along
                    self.stop(status.name, grace_s=0.5)
        self._closed.set()
        with self._lock:
            broker, self._statuses, self._nodes = self._broker, {}, ()
        if broker is not None:
            broker.end()
        self._keeper.join(timeout=15)

    def _ask(self, frame: StartWorker | StopWorker) -> None:
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        with self._lock:
            broker = self._broker
            if broker is None or not self._attached.is_set():
                raise self._why_not or ConnectFailed("the cluster's Ray does not answer", where=self._address.head)
            self._answers[frame.request] = answers
        try:
            broker.send(frame)
            answer = answers.get(timeout=_ANSWER_TIMEOUT_S)
        except queue.Empty:
            raise ReplyTimeout(f"Ray did not act within {_ANSWER_TIMEOUT_S:g} s", where=self._address.head) from None
        finally:
            with self._lock:
                self._answers.pop(frame.request, None)
        if answer.failure is not None:
            raise answer.failure.error()

    def _wait_attached(self, timeout_s: float) -> None:
        deadline_s = self._clock.now_s() + timeout_s
        while not self._attached.wait(0.05):
            with self._lock:
                error = self._why_not
            if error is None and self._clock.now_s() > deadline_s:
                error = ReplyTimeout(f"Ray did not answer within {timeout_s:g} s", where=self._address.head)
            if error is not None:
                self.close()
                raise error

    def _keep_attached(self) -> None:
        pauses = itertools.chain(_REATTACH_AFTER_S, itertools.repeat(_REATTACH_AFTER_S[-1]))
        while not self._closed.is_set():
            try:
                self._address, security = self._where()
            except ShardwiseError as why:  # this machine has left the cluster
                self._detached(why)
                self._closed.wait(next(pauses))
                continue
            broker = _BrokerProcess(self._address, security)
            with self._lock:
                self._broker = broker
            error = self._listen(broker)
            self._detached(error)
            if self._closed.wait(next(pauses)):
                return

    def _listen(self, broker: _BrokerProcess) -> ShardwiseError:
        """Take reports until the broker ends; why it did."""
        reason: ShardwiseError | None = None
        try:
            while reason is None:
                reason = self._take(broker.receive())
        except (EOFError, ValueError):  # it ended, or `close` closed the pipe
            reason = None
        except ShardwiseError as error:
            reason = error
        broker.end()
        where = self._address.head
        return reason or PeerClosed("the connection to Ray ended", where=where, hint=broker.last_words())

    def _take(self, frame: AnyFrame) -> ShardwiseError | None:
        if isinstance(frame, Broken):
            return frame.failure.error()
        with self._lock:
            if isinstance(frame, Report):
                self._nodes, self._statuses = frame.nodes, {s.name: s for s in frame.statuses}
                self._why_not = None
                self._attached.set()
            elif isinstance(frame, Answer) and frame.request in self._answers:
                self._answers[frame.request].put(frame)
        return None

    def _detached(self, error: ShardwiseError) -> None:
        """Nobody watches the workers any more: they are dead, and whoever waits for an answer gets the reason."""
        with self._lock:
            self._attached.clear()
            self._why_not = error
            self._nodes = ()
            for name, status in self._statuses.items():
                self._statuses[name] = replace(
                    status, alive=False, memory_bytes=0, log_tail=f"{status.log_tail}\n{error.message}".strip()
                )
            failure = FailureNote.of(StageLoadFailed(error.message, where=error.where, hint=error.hint))
            for request, answers in self._answers.items():
                answers.put(Answer(request=request, failure=failure))


class _BrokerProcess:
    """The broker as a child."""

    def __init__(self, address: RayAddress, security: RaySecurity) -> None:
        self._process = start_child(functools.partial(_spawn, security))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin: IO[bytes] = self._process.stdin
        self._stdout: IO[bytes] = self._process.stdout
        self._writing = threading.Lock()
        self._log: collections.deque[str] = collections.deque(maxlen=20)
        self._pump = threading.Thread(target=self._read_log, args=(self._process.stderr,), name="ray-broker-log", daemon=True)
        self._pump.start()
        self.send(Attach(head=address.head, own_ip=address.own_ip))

    def send(self, frame: AnyFrame) -> None:
        """To the broker; a broker that is gone is noticed by who reads."""
        with self._writing, contextlib.suppress(OSError, ValueError):
            write_frame(self._stdin, frame)  # type: ignore[arg-type]

    def receive(self) -> AnyFrame:
        """The next frame; `EOFError` once the broker is gone."""
        return read_frame(self._stdout)  # type: ignore[arg-type]

    def last_words(self) -> str:
        """The end of its log."""
        return " | ".join(list(self._log)[-3:])

    def end(self) -> None:
        """Close its input; it ends by itself within a second, or is killed. May be called twice."""
        with self._writing, contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
        self._pump.join(timeout=2)
        self._stdout.close()

    def _read_log(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                self._log.append(line.decode(errors="replace").rstrip()[:300])


def _spawn(security: RaySecurity) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *_BROKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ray_environment(security),
    )
