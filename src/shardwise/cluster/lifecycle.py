"""up, join, invite, nodes, leave, down: what the commands do, as functions over a state folder.

**Promises** a command returns when what it says is true (Ray runs, the node is ready, the daemon is gone) or raises;
a failed `up` or `join` leaves nothing behind; repeating a command is safe. **Fails with** the errors of the control
link, `UsageError`, `CompatibilityError`. **Called by** the command line, tests, `deploy` (`attach`).
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
from pathlib import Path
from typing import TypeVar

import psutil

from shardwise.clock import Clock, SystemClock
from shardwise.cluster.control import (
    DrainRequest,
    Goodbye,
    InviteMade,
    InviteRequest,
    JoinGranted,
    JoinRequest,
    ListRequest,
    NodeList,
    Reply,
    Request,
    RevokeRequest,
    StopRequest,
)
from shardwise.cluster.control_link import ControlClient
from shardwise.cluster.engine import NodeInfo
from shardwise.cluster.interfaces import address_toward, choose_address
from shardwise.cluster.machine import default_name, own_card, safe_name
from shardwise.cluster.mdns import Browser, FoundCluster
from shardwise.cluster.ray_engine import RayAddress, RayEngine, RaySecurity
from shardwise.cluster.ray_engine.raylet import RAY_MODULES
from shardwise.cluster.ray_engine.settings import require_supported_ray
from shardwise.cluster.ray_engine.tls import TlsAuthority
from shardwise.cluster.state import COORDINATOR, DEFAULT_PORT, NODE, ClusterFile, DaemonFile, StateDir
from shardwise.errors import (
    AuthenticationFailed,
    ConnectFailed,
    ConnectTimeout,
    NetworkError,
    ProtocolMismatch,
    ReplyTimeout,
    UsageError,
)
from shardwise.records import Record
from shardwise.transport.security import ClusterKey, Invite, NodeKeys
from shardwise.transport.security.private_files import write_private

T = TypeVar("T")
START_TIMEOUT_S = 180.0  # Ray starts in 5 s on an idle machine and in 60 on a very busy one
STOP_TIMEOUT_S = 30.0
INVITE_VALID_S = 600.0


class UpOptions(Record):
    """What `cluster up` may be told."""

    name: str = ""  # of this node
    cluster_name: str = "home"
    port: int = DEFAULT_PORT
    interface: str = ""
    memory_bytes: int = 0
    dashboard: bool = False
    ray_address: str = ""  # attach to a Ray that is there already
    ray_token: str = ""


class JoinOptions(Record):
    """What `cluster join` may be told."""

    name: str = ""
    interface: str = ""
    memory_bytes: int = 0
    port: int = 0  # 0 = the coordinator's


def prepare_up(state: StateDir, options: UpOptions) -> ClusterFile:
    """Write keys and the cluster file of a new cluster, or take what is there."""
    require_supported_ray()
    if state.cluster.exists():
        cluster = state.load_cluster()
        if cluster.role != COORDINATOR:
            raise UsageError(
                f"this machine is a node of '{cluster.cluster_name}'", where="cluster up", hint="'shardwise cluster leave' first"
            )
        return cluster
    choose_address(options.interface)
    if options.ray_address:
        _require_ray(options)
    key = ClusterKey.generate()
    key.save(state.cluster_key)
    if not options.ray_address:
        write_private(state.authority, TlsAuthority.generate(key.cluster_id))
    cluster = ClusterFile(
        role=COORDINATOR,
        cluster_id=key.cluster_id,
        cluster_name=safe_name(options.cluster_name),
        name=safe_name(options.name or default_name()),
        coordinator_public=NodeKeys.load_or_make(state.node_key).public,
        coordinator_addresses=(),
        ray_head=options.ray_address,
        ray_token=options.ray_token if options.ray_address else secrets.token_hex(32),
        port=options.port,
        interface=options.interface,
        memory_bytes=options.memory_bytes,
        dashboard=options.dashboard,
        attached=bool(options.ray_address),
    )
    state.save_cluster(cluster)
    return cluster


def _require_ray(options: UpOptions) -> None:
    """The Ray that is to be used answers, takes the token, and has a node here."""
    host, _, port = options.ray_address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"--ray-address {options.ray_address}", where="cluster up", hint="HOST:PORT, e.g. 127.0.0.1:6379")
    address, security = RayAddress(head=options.ray_address), RaySecurity(token=options.ray_token)
    RayEngine(lambda: (address, security)).close()


def up(state: StateDir, options: UpOptions) -> str:
    """Make this machine a cluster; returns an invite. On a running coordinator it only makes another invite."""
    fresh = not state.cluster.exists()
    prepare_up(state, options)
    if not daemon_runs(state):
        try:
            start_daemon(state)
        except BaseException:
            if fresh:
                state.forget_cluster()
            raise
    return invite(state)


def invite(state: StateDir, valid_s: float = INVITE_VALID_S) -> str:
    """One more invite, on the coordinator's machine."""
    if state.load_cluster().role != COORDINATOR:
        raise UsageError("only the machine that the cluster was made on invites", where="cluster invite", hint="run it there")
    reply = ask_daemon(state, InviteRequest(valid_s=valid_s))
    return _expect(reply, InviteMade).invite


def prepare_join(state: StateDir, invite_text: str, options: JoinOptions) -> ClusterFile:
    """Use the invite and write what was granted."""
    require_supported_ray()
    invite = Invite.decode(invite_text)
    previous = state.load_cluster() if state.cluster.exists() else None
    if previous is not None and previous.role == COORDINATOR:
        raise UsageError(
            f"this machine is the coordinator of '{previous.cluster_name}'",
            where="cluster join",
            hint="'shardwise cluster down' first",
        )
    keys = NodeKeys.load_or_make(state.node_key)
    host = invite.addresses[0].removeprefix("tcp://").rpartition(":")[0].strip("[]") if invite.addresses else ""
    address = choose_address(options.interface, toward=host)
    name = safe_name(options.name or default_name())
    card = own_card(keys.public, name, address, options.memory_bytes)
    client = ControlClient(invite.addresses, invite.keys(), invite.coordinator_public)
    try:
        granted = _expect(client.ask(JoinRequest(card=card), timeout_s=8.0), JoinGranted)
    except AuthenticationFailed as error:
        raise AuthenticationFailed(
            "the cluster does not take this invite: it was used, has expired, or is of another cluster",
            where=error.where,
            hint="'shardwise cluster invite' on the coordinator's machine makes a new one",
        ) from error
    except (ConnectFailed, ConnectTimeout, ReplyTimeout) as error:
        raise type(error)(
            f"the cluster's coordinator does not answer: {error.message}",
            where=error.where,
            hint="is it awake and on this network ('shardwise cluster nodes' there), and does its firewall let this port in "
            "('shardwise doctor' there)?",
        ) from error
    finally:
        client.close()
    if previous is not None:
        stop_daemon(state, StopRequest(goodbye=previous.cluster_id != granted.cluster_id))
    cluster = ClusterFile(
        role=NODE,
        cluster_id=granted.cluster_id,
        cluster_name=granted.cluster_name,
        name=granted.name,
        coordinator_public=granted.coordinator_public,
        coordinator_addresses=granted.coordinator_addresses,
        ray_head=granted.ray_head,
        ray_token=granted.ray_token,
        port=options.port or _port_of(granted.coordinator_addresses),
        interface=options.interface,
        memory_bytes=options.memory_bytes,
        starts=previous.starts if previous is not None else 0,
        tls_address=granted.tls.address if granted.tls is not None else "",
        attached=False,
    )
    if granted.tls is not None:
        granted.tls.write(state.tls)
    state.save_cluster(cluster)
    return cluster


def join(state: StateDir, invite_text: str, options: JoinOptions) -> ClusterFile:
    """Become a node; returns when it is ready."""
    prepare_join(state, invite_text, options)
    start_daemon(state)
    return state.load_cluster()


def nodes(state: StateDir) -> NodeList:
    """Who is there, asked of the coordinator."""
    cluster = state.load_cluster()
    client = ControlClient(cluster.coordinator_addresses, NodeKeys.load(state.node_key), cluster.coordinator_public)
    try:
        return _expect(client.ask(ListRequest(), timeout_s=6.0), NodeList)
    finally:
        client.close()


def drain(state: StateDir, name: str = "") -> None:
    """A node (default: this one) gets nothing new."""
    ask_daemon(state, DrainRequest(name=name))


def leave(state: StateDir, *, drain_s: float = 0.0, clock: Clock | None = None) -> int:
    """Leave the cluster; with `drain_s` wait until no worker is left here. Returns the workers that were still there."""
    cluster = state.load_cluster()
    if cluster.role == COORDINATOR:
        raise UsageError(
            "the coordinator cannot leave its own cluster", where="cluster leave", hint="'shardwise cluster down' ends it"
        )
    waited = clock or SystemClock()
    if drain_s > 0:
        drain(state)
        deadline_s = waited.now_s() + drain_s
        while num_workers_here(state) and waited.now_s() < deadline_s:
            waited.sleep(0.2)
    left = num_workers_here(state)
    stop_daemon(state, StopRequest(goodbye=True))
    state.forget_cluster()
    state.forget_log()
    return left


def announce_sleep(state: StateDir) -> None:
    """Tell the cluster that this machine goes to sleep now; it comes back by itself."""
    ask_daemon(state, Goodbye(asleep=True))


def revoke(state: StateDir, name: str) -> None:
    """Ban a node's key for good, on the coordinator's machine."""
    ask_daemon(state, RevokeRequest(name=name))


def down(state: StateDir) -> None:
    """End the cluster (on the coordinator's machine) with all its daemons."""
    cluster = state.load_cluster()
    if cluster.role != COORDINATOR:
        raise UsageError(
            f"'{cluster.cluster_name}' was made on another machine", where="cluster down", hint="'shardwise cluster leave' here"
        )
    stop_daemon(state, StopRequest())
    state.forget_cluster()
    state.forget_log()


def find(interface: str = "", wait_s: float = 2.0) -> list[FoundCluster]:
    """Clusters that announce themselves on this network."""
    with Browser(choose_address(interface)) as browser:
        browser.wait_for("", wait_s)
        return browser.clusters()


def attach(state: StateDir | None = None, *, timeout_s: float = 60.0) -> RayEngine:
    """The engine of the cluster that this machine belongs to."""
    folder = state or StateDir()

    def where() -> tuple[RayAddress, RaySecurity]:
        cluster = folder.load_cluster()
        own_ip = "" if cluster.attached else address_toward(cluster.ray_head.rpartition(":")[0].strip("[]"))
        return RayAddress(head=cluster.ray_head, own_ip=own_ip), RaySecurity(token=cluster.ray_token, tls_folder=str(folder.tls))

    return RayEngine(where, attach_timeout_s=timeout_s)


def own_node(state: StateDir, infos: list[NodeInfo]) -> NodeInfo:
    """This machine among an engine's nodes."""
    name = state.load_cluster().name
    for info in infos:
        if info.name == name:
            return info
    raise UsageError(f"this machine ('{name}') is not up in the cluster", where="cluster", hint="see 'shardwise cluster nodes'")


# -- the daemon ------------------------------------------------------------------------------------------------------


def daemon_runs(state: StateDir) -> bool:
    """Whether this folder's daemon lives."""
    known = state.load_daemon()
    return known is not None and bool(known.control_address) and _is_daemon(known.pid)


def start_daemon(state: StateDir, *, timeout_s: float = START_TIMEOUT_S) -> DaemonFile:
    """Start it in the background and wait until it is ready; a daemon that fails is ended and its reason raised."""
    state.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    state.daemon.unlink(missing_ok=True)
    with os.fdopen(os.open(state.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardwise.cluster.daemon", str(state.folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    clock = SystemClock()
    deadline_s = clock.now_s() + timeout_s
    known: DaemonFile | None = None
    while clock.now_s() < deadline_s:
        known = state.load_daemon()
        if known is not None and known.ready:
            threading.Thread(target=process.wait, name="reaper", daemon=True).start()  # it outlives this call, not unnoticed
            return known
        if process.poll() is not None or (known is not None and known.fatal):
            break
        clock.sleep(0.05)
    if process.poll() is None:
        process.terminate()
        process.wait(timeout=STOP_TIMEOUT_S)
    reason = (known.trouble if known is not None else "") or _last_line(state.log) or "it did not become ready"
    state.daemon.unlink(missing_ok=True)
    raise UsageError(
        f"the cluster's daemon did not start: {reason}", where=str(state.log), hint="'shardwise doctor' looks for causes"
    )


def become_daemon(state: StateDir) -> None:
    """Replace this process by the daemon (for service managers)."""
    os.execv(sys.executable, [sys.executable, "-m", "shardwise.cluster.daemon", str(state.folder)])


def ask_daemon(state: StateDir, request: Request, *, timeout_s: float = 6.0) -> Reply:
    """Ask this machine's own daemon."""
    state.load_cluster()
    known = state.load_daemon()
    if known is None or not known.control_address or not _is_daemon(known.pid):
        raise UsageError("the cluster's daemon is not running here", where=str(state.folder), hint="'shardwise cluster start'")
    client = ControlClient([known.control_address], NodeKeys.load(state.node_key), known.public)
    try:
        return client.ask(request, timeout_s=timeout_s)
    finally:
        client.close()


def stop_daemon(state: StateDir, request: StopRequest, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Ask it to end and wait until it has; without an answer it is terminated."""
    known = state.load_daemon()
    if known is None or not _is_daemon(known.pid):
        return
    try:
        process = psutil.Process(known.pid)
    except psutil.NoSuchProcess:
        return
    try:
        ask_daemon(state, request)
    except (NetworkError, UsageError):
        process.terminate()
    try:
        process.wait(timeout=timeout_s)
    except psutil.TimeoutExpired:
        process.kill()
        raise ReplyTimeout(f"the daemon {known.pid} did not end within {timeout_s:g} s and was killed", where="cluster") from None


def num_workers_here(state: StateDir) -> int:
    """Worker processes below this machine's daemon."""
    known = state.load_daemon()
    if known is None or not _is_daemon(known.pid):
        return 0
    count = 0
    for process in psutil.Process(known.pid).children(recursive=True):
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        count += "shardwise.cluster.child" in command and RAY_MODULES.isdisjoint(command)
    return count


def _is_daemon(pid: int) -> bool:
    """The process lives and is ours (ids are used again after a reboot)."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and "shardwise.cluster.daemon" in process.cmdline()
    except psutil.Error:
        return False


def _port_of(addresses: tuple[str, ...]) -> int:
    return int(addresses[0].rpartition(":")[2]) if addresses else DEFAULT_PORT


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1][:300] if lines else ""


def _expect(reply: Reply, kind: type[T]) -> T:
    if not isinstance(reply, kind):
        raise ProtocolMismatch(f"a {type(reply).__name__} where a {kind.__name__} was expected")
    return reply
