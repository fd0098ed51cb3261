"""A raylet (and on the head Ray's control service) as a child process of ours, never as a stray daemon.

`RayletSettings` flow into the command line of `ray start --block`; the token goes by environment. **Promises** ends
with this process (Ray's own processes follow theirs), touches no other Ray on the machine (`ray stop` would), removes
its temporary folder. **Fails with** `ConnectFailed`, `AuthenticationFailed` or `UsageError` (port in use), with the end
of Ray's log. **Called by** the cluster's daemon.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import psutil

from shardwise.clock import SystemClock
from shardwise.cluster.interfaces import url_host
from shardwise.cluster.ray_engine.head import TELL_EVERY_S, HeadNews, read_news
from shardwise.cluster.ray_engine.settings import (
    LABEL_IDENTITY,
    LABEL_INCARNATION,
    LABEL_NODE,
    RaySecurity,
    ray_environment,
    require_supported_ray,
)
from shardwise.cluster.ray_engine.temp_folder import make_folder, remove_folder
from shardwise.cluster.spawn import start_child
from shardwise.errors import AuthenticationFailed, ConnectFailed, ReplyTimeout, ShardwiseError, UsageError
from shardwise.records import Record

_STARTED = "Ray runtime started"
_OBJECT_STORE_BYTES = 80 * 10**6  # Ray's least: no tensor goes through it
_CHILD = ("-m", "shardwise.cluster.child")
_NODE, _HEAD = "ray.scripts.scripts", "shardwise.cluster.ray_engine.head"
RAY_MODULES = frozenset((_NODE, _HEAD))
_START = ("start", "--block", "--log-style", "record", "--log-color", "false")
_NEWS_AGE_S = 5 * TELL_EVERY_S  # older news of the head are none


class RayPorts(Record):
    """Fixed ports, so that a firewall can be told; 0 = any free one."""

    head: int = 0
    node_manager: int = 0
    object_manager: int = 0
    first_worker: int = 0
    last_worker: int = 0

    def require_free(self, own_ip: str, *, head: bool) -> None:
        """Raise `UsageError` for a port that something listens on: Ray would find out after half a minute."""
        for port in filter(None, (self.head if head else 0, self.node_manager, self.object_manager)):
            with socket.socket(socket.AF_INET6 if ":" in own_ip else socket.AF_INET) as trial:
                if os.name == "posix":
                    trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    trial.bind((own_ip, port))
                except OSError as error:
                    raise UsageError(
                        f"port {port} cannot be used: {error.strerror}", where=own_ip, hint="choose others with --port"
                    ) from error

    def arguments(self) -> list[str]:
        """For `ray start`."""
        out = ["--node-manager-port", str(self.node_manager), "--object-manager-port", str(self.object_manager)]
        if self.first_worker:
            out += ["--min-worker-port", str(self.first_worker), "--max-worker-port", str(self.last_worker)]
        return out


class RayletSettings(Record):
    """One raylet. `join` is the head's address; empty = be the head."""

    name: str
    identity: str
    own_ip: str
    join: str = ""
    incarnation: int = 1
    memory_bytes: int = 0
    ports: RayPorts = RayPorts()
    dashboard: bool = False
    folder_note: str = ""  # file that remembers Ray's temporary folder, for whoever comes after a kill

    @property
    def module(self) -> list[str]:
        """What runs: Ray's program, on the head with a watch beside it."""
        return [_NODE] if self.join else [_HEAD, f"{url_host(self.own_ip)}:{self.ports.head}"]

    def arguments(self) -> list[str]:
        """The rest of the command line."""
        labels = f"{LABEL_NODE}={self.name},{LABEL_IDENTITY}={self.identity},{LABEL_INCARNATION}={self.incarnation}"
        out = ["--node-ip-address", self.own_ip, "--num-cpus", "0", "--num-gpus", "0", "--labels", labels]
        out += ["--object-store-memory", str(_OBJECT_STORE_BYTES), "--disable-usage-stats", "--include-log-monitor", "false"]
        if self.memory_bytes:
            out += ["--memory", str(self.memory_bytes)]
        out += self.ports.arguments()
        if self.join:
            return [*out, "--address", self.join]
        dashboard = "true" if self.dashboard else "false"
        return [*out, "--head", "--port", str(self.ports.head), "--include-dashboard", dashboard]


class Raylet:
    """Started on construction; `wait_started` tells whether it stands."""

    def __init__(self, settings: RayletSettings, security: RaySecurity) -> None:
        require_supported_ray()
        settings.ports.require_free(settings.own_ip, head=not settings.join)
        self.settings = settings
        self._note = Path(settings.folder_note) if settings.folder_note else None
        self._folder = make_folder(self._note)
        self._log: collections.deque[str] = collections.deque(maxlen=60)
        self._started = threading.Event()
        self._clock = SystemClock()
        self._news, self._news_s = HeadNews(), self._clock.now_s()
        self._process = start_child(functools.partial(_spawn, settings, security, self._folder))
        assert self._process.stdout is not None
        self._pump = threading.Thread(target=self._read_log, args=(self._process.stdout,), name="raylet-log", daemon=True)
        self._pump.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def news(self) -> HeadNews:
        """What the head said last, where this is the head."""
        old = not self.alive() or self._clock.now_s() - self._news_s > _NEWS_AGE_S
        return HeadNews() if old else self._news

    def wait_started(self, cancel: threading.Event | None = None, timeout_s: float = 150.0) -> bool:
        """Return once the raylet is part of the cluster, or False when cancelled; raises why it is not."""
        deadline_s = self._clock.now_s() + timeout_s
        while not self._started.wait(0.1):
            if cancel is not None and cancel.is_set():
                return False
            if self._process.poll() is not None:
                self._pump.join(timeout=2)
                raise self._failure()
            if self._clock.now_s() > deadline_s:
                raise ReplyTimeout(f"Ray did not start within {timeout_s:g} s", where=self.settings.name, hint=self.log_tail())
        return True

    def alive(self) -> bool:
        """Whether `ray start --block` still runs: it ends when its raylet does."""
        return self._process.poll() is None

    def log_tail(self, num_lines: int = 5) -> str:
        """The end of what Ray said."""
        return " | ".join(list(self._log)[-num_lines:])

    def stop(self, grace_s: float = 3.0) -> None:
        """End it, all that it started, and its folder; may be called twice."""
        family = _family(self.pid)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=grace_s)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(timeout=10)
        for left in family:  # a raylet without its parent would keep its ports for 20 s, waiting for its head
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        psutil.wait_procs(family, timeout=5)
        self._pump.join(timeout=5)
        remove_folder(self._folder, self._note)

    def _read_log(self, stream: IO[bytes]) -> None:
        with stream:
            for raw in stream:
                news = read_news(raw)
                if news is not None:
                    self._news, self._news_s = news, self._clock.now_s()
                    continue
                line = raw.decode(errors="replace").rstrip()
                self._log.append(line[:300])
                if _STARTED in line:
                    self._started.set()

    def _failure(self) -> ShardwiseError:
        log, where = self.log_tail(12), self.settings.name
        if "token" in log.lower() or "unauthenticated" in log.lower():
            return AuthenticationFailed("Ray refused the cluster's token", where=where, hint="join again with a new invite")
        if "already in use" in log or "occupied" in log:
            return UsageError("a port of Ray is in use", where=where, hint=f"choose another with --port; Ray said: {log[-300:]}")
        if self.settings.join:
            return ConnectFailed(f"Ray did not join {self.settings.join}", where=where, hint=f"Ray said: {log[-400:]}")
        return ConnectFailed("Ray did not start", where=where, hint=f"Ray said: {log[-400:]}")


def _family(pid: int) -> list[psutil.Process]:
    """What runs below a process or in its session; the latter also where it has ended itself."""
    found: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        found = {child.pid: child for child in psutil.Process(pid).children(recursive=True)}
    if os.name == "posix":
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if os.getsid(process.pid) == pid != process.pid:
                    found[process.pid] = process
    return list(found.values())


def _spawn(settings: RayletSettings, security: RaySecurity, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *_CHILD, *settings.module, *_START, *settings.arguments(), "--temp-dir", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=ray_environment(security),
        start_new_session=True,
    )
