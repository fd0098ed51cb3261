"""This machine's card: name, address, versions and the memory that a model may use, as told to the cluster."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import psutil

from shardwise.clock import Clock, SystemClock
from shardwise.cluster.control import NodeCard
from shardwise.cluster.versions import own_versions
from shardwise.processors import usable_cores

_RESERVE_BYTES = 512 * 2**20  # for the system and Ray's own processes
_CGROUP = Path("/sys/fs/cgroup")


def own_card(public: str, name: str, address: str, memory_bytes: int = 0, clock: Clock | None = None) -> NodeCard:
    """What this machine tells the coordinator."""
    return NodeCard(
        public=public,
        name=name,
        address=address,
        memory_bytes=memory_bytes or usable_memory_bytes(),
        num_cores=usable_cores(),
        wall_s=(clock or SystemClock()).wall_s(),
        **own_versions(),
    )


def default_name() -> str:
    """The host's name, made safe for labels."""
    return safe_name(platform.node().split(".")[0])


def safe_name(name: str) -> str:
    """Letters, digits, `-` and `_` only, at most 40 (Ray's labels and mDNS allow little more)."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_")[:40] or "node"


def usable_memory_bytes() -> int:
    """What a model may use now: free memory and this process's cgroup limit, less a reserve."""
    available = int(psutil.virtual_memory().available)
    limit = cgroup_free_bytes()
    if limit is not None:
        available = min(available, limit)
    return max(0, available - min(_RESERVE_BYTES, available // 8))


def cgroup_free_bytes(root: Path = _CGROUP, groups: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes left under the tightest memory limit of this process's control groups (v1 and v2); None = no limit."""
    if not groups.exists():
        return None
    found: list[int] = []
    for line in groups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _free_upwards(root, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            found += _free_upwards(root / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min(found, default=None)


def _free_upwards(root: Path, path: str, limit_name: str, used_name: str) -> list[int]:
    """Free bytes of a group and all groups above it."""
    out = []
    folder = root / path.lstrip("/")
    while True:
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None and limit < 2**60:  # v1 writes "none" as a huge number
            out.append(max(0, limit - used))
        if folder in (root, folder.parent):
            return out
        folder = folder.parent


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
