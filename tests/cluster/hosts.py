"""Machines for tests: a state and a cache folder each, perhaps in a network namespace of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from shardwise.cluster import lifecycle
from shardwise.cluster.state import StateDir
from tests.cluster.waiting import is_gone

COMMAND_TIMEOUT_S = 240
_FIRST_PORT = 17000 + os.getpid() % 40 * 300  # below the range that the system gives out; another run has others
PORTS = {name: _FIRST_PORT + 100 * i for i, name in enumerate(("desk", "nas", "pi"))}  # of hosts that share one address


class Hosts:
    """`prefix` is what to put before a command so that it runs on a host."""

    def __init__(self, folder: Path, prefix: Callable[[str], list[str]] | None = None) -> None:
        self.folder = folder
        self.prefix = prefix or (lambda host: [])
        self.names: set[str] = set()

    def state(self, host: str) -> StateDir:
        self.names.add(host)
        return StateDir(self.folder / host)

    def environment(self, host: str) -> dict[str, str]:
        self.names.add(host)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS")}
        own = {"SHARDWISE_STATE": str(self.folder / host), "SHARDWISE_CACHE": str(self.folder / f"cache-{host}")}
        return kept | own | {"XDG_CACHE_HOME": str(self.folder / f"xdg-{host}"), "COLUMNS": "160"}

    def popen(self, host: str, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Python with these arguments on a host."""
        full = [*self.prefix(host), sys.executable, *command]
        return subprocess.Popen(full, env=self.environment(host), text=True, **options)

    def python(self, host: str, *command: str, code: int = 0) -> str:
        """Run it to its end; what it printed."""
        process = self.popen(host, *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, log = process.communicate(timeout=COMMAND_TIMEOUT_S)
        assert process.returncode == code, out + log + self.log(host)
        return out

    def run(self, host: str, *command: str, code: int = 0) -> Any:
        """`shardwise --json ...` on a host; its JSON."""
        out = self.python(host, "-m", "shardwise.cli", "--json", *command, code=code)
        return json.loads(out) if out.strip() else None

    def paste(self, host: str, line: str, *more: str) -> Any:
        """A line that `up` or `invite` printed, typed on another host."""
        program, *arguments = line.split()
        assert program == "shardwise"
        return self.run(host, *arguments, *more)

    def log(self, host: str) -> str:
        log = self.state(host).log
        return log.read_text() if log.exists() else ""

    def states(self, host: str = "desk") -> dict[str, str]:
        """Name -> state, as the command on a host shows it."""
        return {n["member"]["name"]: n["member"]["state"] for n in self.run(host, "cluster", "nodes")["nodes"]}

    def pids(self, host: str) -> list[int]:
        """The daemon of a host and everything below it."""
        known = self.state(host).load_daemon()
        if known is None or is_gone(known.pid):
            return []
        daemon = psutil.Process(known.pid)
        return [daemon.pid, *(p.pid for p in daemon.children(recursive=True))]

    def process(self, host: str, name: str) -> psutil.Process:
        """The process of that name below a host's daemon."""
        return next(p for p in map(psutil.Process, self.pids(host)) if p.name() == name)

    def end(self) -> None:
        """Whatever happened: no daemon is left."""
        for host in self.names:
            known = self.state(host).load_daemon()
            if known is not None and lifecycle.daemon_runs(self.state(host)):
                psutil.Process(known.pid).kill()
