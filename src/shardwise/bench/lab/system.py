"""The seam to Linux: `ip`, `tc`, namespaces and cgroups. Everything else in the lab is portable.

Fails when a command is missing or refuses: `UsageError` for what the caller can change (no root, no iproute2),
`ConnectFailed` with the command and its own words otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from shardwise.clock import SystemClock
from shardwise.errors import ConnectFailed, UsageError

_CLONE_NEWNET = 0x40000000
_CLOCK = SystemClock()
NETNS_DIR = Path("/run/netns")
_CGROUP = Path("/sys/fs/cgroup")


def lab_unavailable() -> str | None:
    """Why network namespaces cannot be had here, or None when they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the command '{tool}' (iproute2) is missing"
    return None


def call(*command: str, input_text: str | None = None, check: bool = True) -> str:
    """Run a short command and return its output; at most 20 s."""
    done = subprocess.run(command, input=input_text, capture_output=True, text=True, timeout=20, check=False)
    if check and done.returncode:
        raise ConnectFailed(
            f"'{' '.join(command[:8])}' failed: {done.stderr.strip() or done.returncode}",
            where="lab",
            hint="run 'shardwise bench lab clean', then try again",
        )
    return done.stdout


def ip_batch(lines: Iterable[str], *, netns: str | None = None) -> None:
    """Many `ip` commands in one process, inside `netns` if given."""
    command = ["ip", *(["-n", netns] if netns else []), "-batch", "-"]
    call(*command, input_text="\n".join(lines) + "\n")


def tc(netns: str, *args: str, check: bool = True) -> str:
    """One `tc` command in a namespace."""
    return call("tc", "-n", netns, *args, check=check)


def enter_netns(name: str) -> None:
    """Move the calling thread into a namespace."""
    fd = os.open(NETNS_DIR / name, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
            code = ctypes.get_errno()
            raise ConnectFailed(f"cannot enter the namespace {name}: {os.strerror(code)}", where="lab")
    finally:
        os.close(fd)


def netns_names(prefix: str) -> list[str]:
    """Existing namespaces whose name starts with `prefix`."""
    return sorted(path.name for path in NETNS_DIR.glob(f"{prefix}*")) if NETNS_DIR.is_dir() else []


def netns_pids(name: str) -> list[int]:
    """Processes that live in a namespace."""
    return [int(word) for word in call("ip", "netns", "pids", name, check=False).split()]


def kill_all(pids: Iterable[int]) -> None:
    """SIGKILL to each, except to ourselves; gone ones are fine."""
    for pid in pids:
        if pid != os.getpid():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def cgroup_dirs(group: str) -> list[Path]:
    """Where the cgroup `group` may live: one directory in version 2; version 1 has one a controller, and often a
    version 2 tree beside them, which can freeze."""
    if (_CGROUP / "cgroup.controllers").exists():
        return [_CGROUP / group]
    return [root / group for root in (_CGROUP / "cpu", _CGROUP / "memory", _CGROUP / "unified") if root.is_dir()]


def make_freezer(group: str) -> tuple[str, str]:
    """A version 2 cgroup that can be frozen: its `cgroup.procs` and `cgroup.freeze`."""
    root = _CGROUP if (_CGROUP / "cgroup.controllers").exists() else _CGROUP / "unified"
    path = root / group
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        hint = "use Host(cpu_share=...) instead"
        raise UsageError(f"hosts cannot be slowed here: {error}", where="lab", hint=hint) from error
    if not (path / "cgroup.freeze").exists():
        raise UsageError("hosts cannot be slowed here: no cgroup version 2", where="lab", hint="use Host(cpu_share=...)")
    return str(path / "cgroup.procs"), str(path / "cgroup.freeze")


def make_cgroup(group: str, cpu_share: float, memory_bytes: int) -> list[Path]:
    """A cgroup with the limits (0 = none); returns the `cgroup.procs` files, empty where cgroups cannot be had."""
    wanted = []
    for path in cgroup_dirs(group):
        limits = _limits(path, cpu_share, memory_bytes)
        if not limits:
            continue
        try:
            path.mkdir(parents=True, exist_ok=True)
            for file, text in limits:
                (path / file).write_text(text)
        except OSError as error:
            raise ConnectFailed(f"cannot limit the cgroup {path}: {error}", where="lab") from error
        wanted.append(path / "cgroup.procs")
    return wanted


def _limits(path: Path, cpu_share: float, memory_bytes: int) -> list[tuple[str, str]]:
    period_us = 10_000  # short, so that a throttled host stutters by less than 10 ms at a time
    quota_us = max(1000, round(cpu_share * period_us))
    if path.parent == _CGROUP:
        files = [("cpu.max", f"{quota_us} {period_us}")] if cpu_share else []
        return files + ([("memory.max", str(memory_bytes))] if memory_bytes else [])
    if path.parent.name == "cpu" and cpu_share:
        return [("cpu.cfs_period_us", str(period_us)), ("cpu.cfs_quota_us", str(quota_us))]
    if path.parent.name == "memory" and memory_bytes:
        return [("memory.limit_in_bytes", str(memory_bytes))]
    return []


def remove_cgroups(prefix: str) -> None:
    """Remove the cgroups whose name starts with `prefix`; thaw and kill what is left in them."""
    roots = {path.parent for path in cgroup_dirs("x")}
    for path in (found for root in roots for found in root.glob(f"{prefix}*")):
        with contextlib.suppress(OSError):
            (path / "cgroup.freeze").write_text("0")
        kill_all(int(pid) for pid in (path / "cgroup.procs").read_text().split())
        for _ in range(200):
            try:
                path.rmdir()
                break
            except OSError:
                _CLOCK.sleep(0.005)


def real_time() -> None:
    """Ask for real-time priority, so that a busy machine does not bend the delays."""
    with contextlib.suppress(PermissionError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(20))
