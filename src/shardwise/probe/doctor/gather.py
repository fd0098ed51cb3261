"""Collects the facts. Asks the system only; writes nothing, changes nothing, needs no rights.

What cannot be read counts as unknown and is left out. **Fails when** nothing: a doctor that crashes helps nobody, and
each source is read on its own.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
from pathlib import Path

import psutil

from shardwise.cluster import lifecycle
from shardwise.cluster.control import ShownNode
from shardwise.cluster.interfaces import list_interfaces
from shardwise.cluster.machine import cgroup_free_bytes, usable_memory_bytes
from shardwise.cluster.spawn import UNSET
from shardwise.cluster.state import COORDINATOR, DEFAULT_PORT, StateDir, port_plan
from shardwise.errors import ShardwiseError
from shardwise.probe.devices import list_accelerators
from shardwise.probe.doctor.facts import ClusterFacts, Facts, Port, Reach
from shardwise.stage.llama import library

_KNOCK_S = 2.0
_COMMAND_S = 3.0


def gather(state: StateDir | None = None, cache: Path | None = None) -> Facts:
    """Everything about this machine, and its cluster where it is in one."""
    folder = state or StateDir()
    cluster = _cluster(folder)
    llama_problem, blas, accelerators = _backend()
    disk = _existing(cache or Path.home())
    return Facts(
        system=platform.system(),
        python=platform.python_version(),
        ray=_version("ray"),
        zeroconf=importlib.util.find_spec("zeroconf") is not None,
        llama=_version("llama-cpp-python"),
        llama_problem=llama_problem,
        blas=blas,
        accelerators=accelerators,
        gpu_seen=_gpu_seen(),
        compiler=next((c for c in ("c++", "g++", "clang++", "cl") if shutil.which(c)), ""),
        memory_bytes=usable_memory_bytes(),
        total_memory_bytes=int(psutil.virtual_memory().total),
        cgroup_bytes=cgroup_free_bytes(),
        disk_free_bytes=shutil.disk_usage(disk).free,
        disk_folder=str(disk),
        shared_memory_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        interfaces=tuple(list_interfaces()),
        ports=() if cluster is not None and cluster.daemon_runs else _ports(DEFAULT_PORT),
        firewalls=_firewalls(),
        wsl="microsoft" in platform.release().lower(),
        container=Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
        battery=_has_battery(),
        sleeps=_sleeps(),
        wifi_power_save=_wifi_power_save(),
        slow_environment=tuple(name for name in UNSET if name in os.environ),
        cluster=cluster,
    )


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _backend() -> tuple[str, bool, tuple[str, ...]]:
    try:
        library.load()
        return "", library.has_blas(), tuple(f"{a.kind} {a.name}" for a in list_accelerators())
    except ShardwiseError as error:
        return error.one_line(), False, ()


def _gpu_seen() -> str:
    """What the system shows of a GPU."""
    if Path("/dev/nvidia0").exists() or Path("/proc/driver/nvidia/version").exists():
        return "an NVIDIA GPU"
    if Path("/dev/kfd").exists():
        return "an AMD GPU"
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return "Apple's GPU"
    return ""


def _ports(first: int) -> tuple[Port, ...]:
    out = []
    for use, number in port_plan(first).items():
        if use.endswith("worker"):
            continue
        with socket.socket() as trial:
            if os.name == "posix":
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(("", number))
                problem = ""
            except OSError as error:
                problem = error.strerror or str(error)
        out.append(Port(number=number, use=use.replace("_", " "), problem=problem))
    return tuple(out)


def _firewalls() -> tuple[str, ...]:
    found = []
    ufw = Path("/etc/ufw/ufw.conf")
    if ufw.exists() and "ENABLED=yes" in _read(ufw):
        found.append("ufw")
    if Path("/run/firewalld.pid").exists():
        found.append("firewalld")
    if platform.system() == "Darwin":
        state = _output("/usr/libexec/ApplicationFirewall/socketfilterfw", "--getglobalstate")
        if "enabled" in state:
            found.append("macOS")
    if platform.system() == "Windows" and "ON" in _output("netsh", "advfirewall", "show", "privateprofile", "state"):
        found.append("Windows")
    return tuple(found)


def _has_battery() -> bool:
    try:
        return psutil.sensors_battery() is not None
    except (AttributeError, OSError):
        return False


def _sleeps() -> str:
    """What would put this machine to sleep, as far as it can be told."""
    system = platform.system()
    if system == "Linux" and _has_battery():
        text = _read(Path("/etc/systemd/logind.conf"))
        lid = [line for line in text.splitlines() if line.strip().startswith("HandleLidSwitch=")]
        return "" if any(line.strip().endswith("ignore") for line in lid) else "closing the lid suspends this machine"
    if system == "Darwin":
        return sleep_of_pmset(_output("pmset", "-g", "custom"))
    if system == "Windows":
        return (
            ""
            if "0x00000000" in _output("powercfg", "/q", "SCHEME_CURRENT", "SUB_SLEEP", "STANDBYIDLE")
            else "it sleeps when idle"
        )
    return ""


def sleep_of_pmset(text: str) -> str:
    """From `pmset -g custom`: whether it sleeps on AC power."""
    on_ac = False
    for line in text.splitlines():
        if line.startswith("AC Power"):
            on_ac = True
        elif not line.startswith(" "):
            on_ac = False
        words = line.split()
        if on_ac and len(words) >= 2 and words[0] == "sleep" and words[1] != "0":
            return f"it sleeps after {words[1]} minutes on power"
    return ""


def _wifi_power_save() -> tuple[str, ...]:
    cards = [path.parent.name for path in Path("/sys/class/net").glob("*/wireless")] if Path("/sys/class/net").exists() else []
    return tuple(card for card in cards if "on" in _output("iw", "dev", card, "get", "power_save").lower())


def _cluster(state: StateDir) -> ClusterFacts | None:
    if not state.cluster.exists():
        return None
    try:
        cluster = state.load_cluster()
        known = state.load_daemon()
        runs = lifecycle.daemon_runs(state)
    except ShardwiseError as error:
        return ClusterFacts(name="?", coordinator=False, daemon_runs=True, trouble=error.one_line())
    addresses = [(a.removeprefix("tcp://"), "the coordinator") for a in cluster.coordinator_addresses]
    reach = tuple(_knock(a, use) for a, use in (*addresses, (cluster.ray_head, "Ray's head"))) if runs else ()
    nodes: tuple[ShownNode, ...] = ()
    trouble = known.trouble if known is not None else ""
    if runs and not any(r.problem for r in reach):
        try:
            nodes = lifecycle.nodes(state).nodes
        except ShardwiseError as error:
            trouble = trouble or error.one_line()
    return ClusterFacts(
        name=cluster.cluster_name,
        coordinator=cluster.role == COORDINATOR,
        daemon_runs=runs,
        trouble=trouble,
        reach=reach,
        nodes=nodes,
        own_public=known.public if known is not None else "",
    )


def _knock(address: str, use: str) -> Reach:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
        return Reach(address=address, use=use)
    except OSError as error:
        return Reach(address=address, use=use, problem=error.strerror or "no answer")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _output(*command: str) -> str:
    """What a command prints; "" where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
