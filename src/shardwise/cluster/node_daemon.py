"""A node's process: beats to the coordinator, runs a raylet, follows the cluster to new addresses. See `daemon`."""

from __future__ import annotations

import logging
import os
import threading

from shardwise.clock import SystemClock
from shardwise.cluster.control import Beat, BeatAnswer, Done, DrainRequest, Goodbye, ListRequest, Reply, Request, StopRequest
from shardwise.cluster.control_link import ControlClient, ControlServer
from shardwise.cluster.coordinator import BEAT_EVERY_S
from shardwise.cluster.interfaces import choose_address
from shardwise.cluster.keeper import RayletKeeper, is_fatal
from shardwise.cluster.machine import own_card
from shardwise.cluster.mdns import Browser
from shardwise.cluster.membership import NodeState
from shardwise.cluster.ray_engine.raylet import RayletSettings, RayPorts
from shardwise.cluster.ray_engine.settings import RaySecurity
from shardwise.cluster.state import DaemonFile, StateDir, port_plan
from shardwise.errors import (
    AuthenticationFailed,
    CompatibilityError,
    NetworkError,
    ProtocolMismatch,
    ShardwiseError,
)
from shardwise.records import replace
from shardwise.transport.security import AllowList, NodeKeys, fingerprint

log = logging.getLogger(__name__)
_BEAT_TIMEOUT_S = 3.0
_SEARCH_AFTER_S = 6.0  # without the coordinator
_SEARCH_S = 3.0
_STOP_RAY_AFTER_S = 30.0  # of being refused: a revoked node keeps nothing running
_LOST_S = 6.0  # a raylet that runs, and that the head does not have for so long, is started anew
_SLEEP_PAUSE_S = 10.0  # no beat for so long after announcing sleep, or it would count as "came back"


class NodeDaemon:
    """The main thread serves the local command line; one thread beats; the raylet has its keeper's."""

    def __init__(self, state: StateDir, stop: threading.Event) -> None:
        self._state, self._stop, self._clock = state, stop, SystemClock()
        self._cluster = state.load_cluster()
        self._keys = NodeKeys.load_or_make(state.node_key)
        own = AllowList()
        own.allow(self._keys.public, "command line", role="driver")
        self._server = ControlServer(["tcp://127.0.0.1:*"], self._keys, own)
        self._client = ControlClient(self._cluster.coordinator_addresses, self._keys, self._cluster.coordinator_public)
        self._asking = threading.Lock()
        self._address = self._own_address()
        self._tls_address = self._cluster.tls_address
        self._incarnation = 0
        self._state_there = NodeState.JOINING  # as the coordinator sees this node
        self._beating_since_s: float | None = None
        self._heard_s = self._clock.now_s()
        self._silent_until_s = 0.0
        self._goodbye = False
        self._over = False  # the cluster is down, or this node left it
        self._trouble = ""
        self._keeper: RayletKeeper | None = None
        self._reported = (False, "")
        self._head_seen = (0, 0)  # the head's start as told with the last beat, and the raylet that ran then
        self._lost_since_s: float | None = None

    def run(self) -> None:
        """Until stopped or the cluster is down."""
        self._keeper = None if self._cluster.attached else RayletKeeper(self._raylet)
        beater = threading.Thread(target=self._beat_on, name="beats", daemon=True)
        beater.start()
        try:
            while not self._stop.is_set():
                self._server.serve_once(self._answer, 0.2)
                self._report()
            beater.join(timeout=2 * _BEAT_TIMEOUT_S)
            self._say_goodbye()
        finally:
            if self._keeper is not None:
                self._keeper.close()
            self._server.close()
            self._client.close()
            if self._over:
                self._state.forget_cluster()
                self._state.forget_log()
            else:
                self._state.daemon.unlink(missing_ok=True)

    def _answer(self, request: Request, sender: str) -> Reply:
        """The local command line; what concerns the cluster is passed on."""
        del sender
        if isinstance(request, StopRequest):
            self._goodbye, self._over = request.goodbye, request.goodbye
            self._stop.set()
            return Done()
        if isinstance(request, Goodbye) and request.asleep:
            self._silent_until_s = self._clock.now_s() + _SLEEP_PAUSE_S
            return self._ask(request)
        if isinstance(request, ListRequest | DrainRequest):
            return self._ask(request)
        raise ProtocolMismatch(f"a node does not answer a {type(request).__name__}", hint="ask on the coordinator's machine")

    def _ask(self, request: Request) -> Reply:
        with self._asking:
            return self._client.ask(request, timeout_s=_BEAT_TIMEOUT_S)

    def _say_goodbye(self) -> None:
        """On `leave`, goodbye; on a mere end of this process (shutdown, update) it counts as sleep."""
        if self._over and not self._goodbye:
            return
        try:
            self._ask(Goodbye(asleep=not self._goodbye))
        except ShardwiseError as error:
            log.warning("could not say goodbye: %s", error.one_line())

    def _beat_on(self) -> None:
        refused_since_s: float | None = None
        while not self._stop.wait(BEAT_EVERY_S):
            if self._clock.now_s() < self._silent_until_s:
                continue
            try:
                self._beat()
                refused_since_s = None
            except (AuthenticationFailed, CompatibilityError) as error:
                self._trouble = error.one_line()
                if isinstance(error, CompatibilityError) and self._incarnation:
                    log.error("replaced: %s", error.one_line())
                    self._over = self._goodbye = False
                    self._stop.set()
                refused_since_s = refused_since_s or self._clock.now_s()
                if self._clock.now_s() - refused_since_s > _STOP_RAY_AFTER_S:
                    log.error("refused for too long, ending: %s", error.one_line())
                    self._stop.set()
            except ShardwiseError as error:
                self._trouble = error.one_line()
                if self._clock.now_s() - self._heard_s > _SEARCH_AFTER_S:
                    self._search()

    def _beat(self) -> None:
        address = self._own_address()
        if address != self._address:
            log.info("the address changed from %s to %s", self._address, address)
            self._address = address
            if self._keeper is not None:
                self._keeper.restart()
        card = own_card(self._keys.public, self._cluster.name, address, self._cluster.memory_bytes)
        alive = self._keeper is None or self._keeper.alive
        beat = Beat(
            card=card,
            raylet_alive=alive,
            raylet_start=self._keeper.start if self._keeper is not None else 0,
            incarnation=self._incarnation,
            tls_address=self._tls_address,
        )
        answer = self._ask(beat)
        if not isinstance(answer, BeatAnswer):
            raise ProtocolMismatch(f"a {type(answer).__name__} is no answer to a beat")
        self._heard_s, self._trouble, self._incarnation = self._clock.now_s(), "", answer.incarnation
        self._state_there = answer.state
        if answer.closing:
            log.info("the cluster goes down")
            self._over = True
            self._stop.set()
            return
        self._follow(answer)

    def _follow(self, answer: BeatAnswer) -> None:
        """Take over what the coordinator says; a new head, token, name or certificate needs a new raylet."""
        if answer.tls is not None:
            answer.tls.write(self._state.tls)
            self._tls_address = answer.tls.address
            if self._keeper is not None:
                self._keeper.restart()
        self._look_at_head(answer.head_start)
        self._look_at_raylet(lost=answer.raylet_lost)
        told = {"ray_head": answer.ray_head, "ray_token": answer.ray_token, "name": answer.name}
        if all(getattr(self._cluster, field) == value for field, value in told.items()):
            return
        self._cluster = self._state.update_cluster(lambda now: replace(now, **told))
        if self._keeper is not None:
            self._keeper.restart()

    def _look_at_head(self, head_start: int) -> None:
        """A raylet that joined an earlier head would wait for it for half a minute; the new one does not know it."""
        keeper, (before, pid) = self._keeper, self._head_seen
        if keeper is None or not head_start:
            return
        if before not in (0, head_start) and keeper.alive and keeper.pid == pid:
            log.info("Ray's head started anew")
            keeper.restart()
        self._head_seen = (head_start, keeper.pid)

    def _look_at_raylet(self, *, lost: bool) -> None:
        """A raylet that its head gave up ends, but its parent may live on; one that started meanwhile joined nobody."""
        keeper, now_s = self._keeper, self._clock.now_s()
        if keeper is None or not lost or not keeper.alive:
            self._lost_since_s = None
        elif self._lost_since_s is None:
            self._lost_since_s = now_s
        elif now_s - self._lost_since_s > _LOST_S:
            log.info("Ray's head does not have this node")
            self._lost_since_s = None
            keeper.restart()

    def _search(self) -> None:
        """The coordinator may have another address: ask the network."""
        self._heard_s = self._clock.now_s()
        try:
            with Browser(self._own_address()) as browser:
                found = browser.wait_for(self._cluster.cluster_id, _SEARCH_S)
        except ShardwiseError as error:
            log.warning("cannot search: %s", error.one_line())
            return
        if found is None or found.addresses == self._client.addresses:
            return
        log.info("the coordinator is at %s now", ", ".join(found.addresses))
        client = ControlClient(found.addresses, self._keys, self._cluster.coordinator_public)  # its key proves it
        with self._asking:
            old, self._client = self._client, client
            old.close()
        addresses = found.addresses
        self._cluster = self._state.update_cluster(lambda now: replace(now, coordinator_addresses=addresses))

    def _own_address(self) -> str:
        host = self._client_host()
        try:
            return choose_address(self._cluster.interface, toward=host)
        except NetworkError:
            return self._address

    def _client_host(self) -> str:
        first = self._client.addresses[0] if self._client.addresses else ""
        return first.removeprefix("tcp://").rpartition(":")[0].strip("[]")

    def _raylet(self) -> tuple[RayletSettings, RaySecurity]:
        starts = self._state.next_start()
        ports = port_plan(self._cluster.port)
        settings = RayletSettings(
            name=self._cluster.name,
            identity=fingerprint(self._keys.public),
            own_ip=self._address,
            join=self._cluster.ray_head,
            incarnation=starts,
            memory_bytes=own_card(self._keys.public, "", "", self._cluster.memory_bytes).memory_bytes,
            ports=RayPorts(**{name: port for name, port in ports.items() if name != "control"}),
            folder_note=str(self._state.ray_folder),
        )
        return settings, RaySecurity(token=self._cluster.ray_token, tls_folder=str(self._state.tls))

    def _report(self) -> None:
        alive = self._keeper is None or self._keeper.alive
        error = self._keeper.trouble if self._keeper is not None else None
        trouble = self._trouble or (error.one_line() if error is not None else "")
        ready = alive and self._state_there in (NodeState.READY, NodeState.DRAINING)
        if (ready, trouble) == self._reported and self._state.daemon.exists():
            return
        self._reported = (ready, trouble)
        self._state.save_daemon(
            DaemonFile(
                pid=os.getpid(),
                control_address=self._server.address,
                public=self._keys.public,
                ready=ready,
                trouble=trouble,
                fatal=is_fatal(error),
            )
        )
