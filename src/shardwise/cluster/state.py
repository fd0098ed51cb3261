"""What a machine remembers about its cluster between runs: keys, role, addresses. All files are private (0600).

Folder: `SHARDWISE_STATE`, or `shardwise` in the user's state folder. **Fails with** `UsageError` where there is no
cluster, or a file is damaged or open to others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from shardwise.cluster.ray_engine.temp_folder import remove_noted
from shardwise.errors import UsageError
from shardwise.records import Record, replace
from shardwise.transport.security.private_files import read_private, write_private

COORDINATOR, NODE = "coordinator", "node"
DEFAULT_PORT = 7700
_RAY_PORT, _NODE_MANAGER, _OBJECT_MANAGER, _FIRST_WORKER, _LAST_WORKER = 1, 2, 3, 10, 99


class ClusterFile(Record):
    """This machine's part in a cluster. Holds secrets."""

    role: str
    cluster_id: str
    cluster_name: str
    name: str  # of this node
    coordinator_public: str
    coordinator_addresses: tuple[str, ...]
    ray_head: str  # host:port
    ray_token: str
    port: int = DEFAULT_PORT  # the first of a hundred
    interface: str = ""  # pinned card or address
    memory_bytes: int = 0  # that a model may use; 0 = as measured
    starts: int = 0  # of this node's raylet, ever: the newest wins
    dashboard: bool = False
    tls_address: str = ""  # for which Ray's certificate was given at the join
    attached: bool = False  # Ray is not ours: it was there before
    format: int = 1


class DaemonFile(Record):
    """Where the running daemon answers."""

    pid: int
    control_address: str
    public: str
    ready: bool = False
    trouble: str = ""
    fatal: bool = False  # waiting will not help


def state_dir() -> Path:
    """The folder, whether it exists or not."""
    if own := os.environ.get("SHARDWISE_STATE"):
        return Path(own)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "shardwise"
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "shardwise"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "shardwise"


class StateDir:
    """The files by name."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or state_dir()
        self._lock = threading.RLock()
        self.node_key = self.folder / "node.key"
        self.cluster_key = self.folder / "cluster.key"
        self.allowed = self.folder / "allowed.json"
        self.invites = self.folder / "invites.json"
        self.cluster = self.folder / "cluster.json"
        self.daemon = self.folder / "daemon.json"
        self.log = self.folder / "daemon.log"
        self.authority = self.folder / "ray-ca.json"
        self.tls = self.folder / "ray-tls"
        self.ray_folder = self.folder / "ray-folder"  # names Ray's temporary folder

    def load_cluster(self) -> ClusterFile:
        """This machine's cluster; `UsageError` where it has none."""
        if not self.cluster.exists():
            hint = "'shardwise cluster up' here, or 'shardwise cluster join INVITE'"
            raise UsageError("this machine is in no cluster", where=str(self.folder), hint=hint)
        return read_private(self.cluster, ClusterFile)

    def save_cluster(self, content: ClusterFile) -> None:
        write_private(self.cluster, content)

    def update_cluster(self, change: Callable[[ClusterFile], ClusterFile]) -> ClusterFile:
        """Read, change and write as one step among this process's threads."""
        with self._lock:
            content = self.load_cluster()
            changed = change(content)
            if changed != content:
                self.save_cluster(changed)
            return changed

    def next_start(self) -> int:
        """Count a start of the raylet."""
        return self.update_cluster(lambda c: replace(c, starts=c.starts + 1)).starts

    def load_daemon(self) -> DaemonFile | None:
        """The daemon's file, or None."""
        return read_private(self.daemon, DaemonFile) if self.daemon.exists() else None

    def save_daemon(self, content: DaemonFile) -> None:
        write_private(self.daemon, content)

    def forget_cluster(self) -> None:
        """Leave nothing but the node's own key and the log."""
        remove_noted(self.ray_folder)
        for path in (self.cluster, self.cluster_key, self.allowed, self.invites, self.daemon, self.authority):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.tls, ignore_errors=True)

    def forget_log(self) -> None:
        """After an end that went well."""
        with contextlib.suppress(OSError):  # Windows: while somebody reads it
            self.log.unlink(missing_ok=True)


def port_plan(first: int) -> dict[str, int]:
    """The fixed ports of a node, for firewalls: control, Ray's services, Ray's workers. 0 = any free ones."""
    if not first:
        return dict.fromkeys(("control", "head", "node_manager", "object_manager", "first_worker", "last_worker"), 0)
    offsets = {
        "control": 0,
        "head": _RAY_PORT,
        "node_manager": _NODE_MANAGER,
        "object_manager": _OBJECT_MANAGER,
        "first_worker": _FIRST_WORKER,
        "last_worker": _LAST_WORKER,
    }
    return {name: first + offset for name, offset in offsets.items()}
