"""The coordinator's process: answers control messages, runs Ray's head, announces the cluster. See `daemon`."""

from __future__ import annotations

import logging
import os
import threading

import shardwise
from shardwise.clock import SystemClock
from shardwise.cluster.control_link import ControlServer
from shardwise.cluster.coordinator import Coordinator
from shardwise.cluster.interfaces import choose_address, list_interfaces, url_host
from shardwise.cluster.keeper import RayletKeeper, is_fatal
from shardwise.cluster.machine import own_card
from shardwise.cluster.mdns import Announcement, FoundCluster
from shardwise.cluster.ray_engine.raylet import RayletSettings, RayPorts
from shardwise.cluster.ray_engine.settings import RaySecurity
from shardwise.cluster.ray_engine.tls import TlsAuthority
from shardwise.cluster.state import ClusterFile, DaemonFile, StateDir, port_plan
from shardwise.errors import ShardwiseError
from shardwise.records import replace
from shardwise.transport.security import AllowList, ClusterKey, InviteBook, NodeKeys, fingerprint
from shardwise.transport.security.private_files import read_private

log = logging.getLogger(__name__)
_SERVE_S = 0.1
_CLOSING_S = 3.0  # so that every node's next beat hears of it
_ADDRESS_EVERY_S = 2.0


class CoordinatorDaemon:
    """One thread serves; the raylet has its keeper's."""

    def __init__(self, state: StateDir, stop: threading.Event) -> None:
        self._state, self._stop, self._clock = state, stop, SystemClock()
        cluster = state.load_cluster()
        self._keys = NodeKeys.load_or_make(state.node_key)
        self._allowed = AllowList.load(state.allowed) if state.allowed.exists() else AllowList()
        self._allowed.allow(self._keys.public, cluster.name, role="driver")
        invites = InviteBook(ClusterKey.load(state.cluster_key), self._allowed, path=state.invites)
        self._address = choose_address(cluster.interface)
        card = own_card(self._keys.public, cluster.name, self._address, cluster.memory_bytes)
        self._server = ControlServer([f"tcp://*:{cluster.port}"], self._keys, self._allowed)
        self._authority = read_private(state.authority, TlsAuthority) if state.authority.exists() else None
        self._coordinator = Coordinator(
            cluster, card, self._allowed, invites, self._clock, self._changed, authority=self._authority
        )
        self._keeper: RayletKeeper | None = None
        self._announcement: Announcement | None = None
        self._reported = (False, "")

    def run(self) -> None:
        """Until stopped; nodes hear of a `StopRequest` before the end."""
        self._move_to(self._address)
        if not self._coordinator.cluster.attached:
            self._keeper = RayletKeeper(self._raylet)
        self._announce()
        self._report()
        closing_since_s: float | None = None
        looked_s = self._clock.now_s()
        try:
            while not self._stop.is_set():
                self._server.serve_once(self._coordinator.handle, _SERVE_S)
                self._look_at_head()
                self._report()
                now_s = self._clock.now_s()
                if now_s - looked_s > _ADDRESS_EVERY_S:
                    looked_s = now_s
                    self._look_at_address()
                if self._coordinator.closing:
                    closing_since_s = closing_since_s or now_s
                    alone = len(self._coordinator.membership.usable()) <= 1
                    if alone or now_s - closing_since_s > _CLOSING_S:
                        break
        finally:
            self._close()

    def _close(self) -> None:
        if self._announcement is not None:
            self._announcement.close()
        if self._keeper is not None:
            self._keeper.close()
        self._server.close()
        if self._coordinator.closing:
            self._state.forget_cluster()
        else:
            self._state.daemon.unlink(missing_ok=True)

    def _changed(self, cluster: ClusterFile) -> None:
        old = self._state.load_cluster()
        self._state.update_cluster(lambda now: replace(cluster, starts=now.starts))
        self._allowed.save(self._state.allowed)
        if cluster.ray_token != old.ray_token and self._keeper is not None:
            self._keeper.restart()

    def _raylet(self) -> tuple[RayletSettings, RaySecurity]:
        starts = self._state.next_start()
        cluster = self._coordinator.cluster
        ports = port_plan(cluster.port)
        settings = RayletSettings(
            name=cluster.name,
            identity=fingerprint(self._keys.public),
            own_ip=self._address,
            incarnation=starts,
            memory_bytes=self._coordinator.card.memory_bytes,
            ports=RayPorts(**{name: port for name, port in ports.items() if name != "control"}),
            folder_note=str(self._state.ray_folder),
            dashboard=cluster.dashboard,
        )
        if self._authority is not None:
            self._authority.issue(cluster.name, self._address).write(self._state.tls)
        return settings, RaySecurity(token=cluster.ray_token, tls_folder=str(self._state.tls))

    def _look_at_head(self) -> None:
        """What Ray's head says decides who is ready; nodes start raylets anew as soon as a new head answers."""
        if self._keeper is None:
            self._coordinator.tick(own_raylet=0)
            return
        news = self._keeper.news
        if news.answers:
            self._coordinator.head_start = self._keeper.start
        self._coordinator.news = news
        self._coordinator.tick(own_raylet=self._keeper.start if self._keeper.alive else None)

    def _look_at_address(self) -> None:
        """A laptop that roamed, or a new lease: Ray's head must move along, and the nodes find it by mDNS or its name."""
        if any(i.address == self._address for i in list_interfaces()):
            return
        try:
            address = choose_address(self._coordinator.cluster.interface)
        except ShardwiseError as error:
            log.warning("no address: %s", error.one_line())
            return
        log.info("the address changed from %s to %s", self._address, address)
        self._move_to(address)
        if self._keeper is not None:
            self._keeper.restart()
        self._announce()

    def _move_to(self, address: str) -> None:
        self._address = address
        cluster = self._coordinator.cluster
        host = url_host(address)
        head = cluster.ray_head if cluster.attached else f"{host}:{port_plan(cluster.port)['head']}"
        self._coordinator.take_address(address, head, (f"tcp://{host}:{cluster.port}",))

    def _announce(self) -> None:
        if self._announcement is not None:
            self._announcement.close()
            self._announcement = None
        cluster = self._coordinator.cluster
        found = FoundCluster(
            cluster_id=cluster.cluster_id,
            name=cluster.cluster_name,
            coordinator=cluster.name,
            public=self._keys.public,
            addresses=(),
            version=shardwise.__version__,
        )
        try:
            self._announcement = Announcement(found, self._address, cluster.port)
        except ShardwiseError as error:  # discovery is a convenience: the invite carries the address
            log.warning("not announced: %s", error.one_line())

    def _report(self) -> None:
        """Write `daemon.json` whenever it would say something new."""
        ready = self._keeper is None or self._keeper.alive
        error = self._keeper.trouble if self._keeper is not None else None
        trouble = error.one_line() if error is not None else ""
        if (ready, trouble) == self._reported and self._state.daemon.exists():
            return
        self._reported = (ready, trouble)
        address = f"tcp://127.0.0.1:{self._coordinator.cluster.port}"
        self._state.save_daemon(
            DaemonFile(
                pid=os.getpid(),
                control_address=address,
                public=self._keys.public,
                ready=ready,
                trouble=trouble,
                fatal=is_fatal(error),
            )
        )
