"""What a run was made on: processor, kernel, versions, load. Reads the machine; fails never (unknown is `unknown`)."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path

import psutil

from shardwise.bench.lab import lab_unavailable
from shardwise.bench.result import Environment
from shardwise.clock import SystemClock

_PACKAGES = ("shardwise", "llama-cpp-python", "pyzmq", "numpy", "msgspec", "torch", "ray", "transformers")


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith(("model name", "Hardware", "Model")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def versions() -> dict[str, str]:
    """Installed versions of what matters."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def load_1min() -> float:
    """How many processes wanted a core, on average over the last minute."""
    return float(psutil.getloadavg()[0])


def machine_s(clock: SystemClock | None = None) -> float:
    """How long a fixed piece of computing takes now (SHA-256 of 4 MiB, median of 5, about 10 ms in all on a quiet machine)."""
    clock = clock or SystemClock()
    data, times_s = bytes(2**22), []
    for _ in range(5):
        start_s = clock.now_s()
        hashlib.sha256(data).digest()
        times_s.append(clock.now_s() - start_s)
    return sorted(times_s)[2]


def iso_now(clock: SystemClock | None = None) -> str:
    """UTC date and time."""
    at = datetime.datetime.fromtimestamp((clock or SystemClock()).wall_s(), tz=datetime.UTC)
    return at.isoformat(timespec="seconds")


def lab_kind() -> str:
    """How virtual homes are made here: namespaces, or relays where they cannot be had."""
    return "relays" if lab_unavailable() else "namespaces"


def capture_environment(*, in_virtual_home: bool = True, notes: tuple[str, ...] = ()) -> Environment:
    """This machine, now."""
    return Environment(
        cpu=cpu_name(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        kernel=platform.release(),
        system=platform.system(),
        python=platform.python_version(),
        versions=versions(),
        load_1min=load_1min(),
        started=iso_now(),
        in_virtual_home=in_virtual_home,
        lab=lab_kind(),
        notes=notes,
    )
