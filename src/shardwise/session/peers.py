"""The driver's connections to the stage workers: one inbox for all of them, one outbox to each."""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq

from shardwise.errors import CompatibilityError, SessionLost, UsageError
from shardwise.records import Record, replace
from shardwise.session.checkpoints import CheckpointSettings
from shardwise.session.plausible import DriverLimits, require_plausible
from shardwise.transport.channel import DRIVER, Envelope, Inbox, Outbox
from shardwise.transport.handshake import Hello
from shardwise.transport.messages import AnyMessage, Connect, OpenSession, Ready, Sampled
from shardwise.transport.security.allow_list import AllowList
from shardwise.transport.security.authenticator import Authenticator
from shardwise.transport.security.keys import NodeKeys

log = logging.getLogger(__name__)

MAX_TOLD = 20  # malformed messages that are logged
Route = Callable[[int, int, str], str]  # (from stage, to stage, its address) -> where to connect instead; the driver is -1


class DriverSettings(Record):
    """How the driver listens and what it admits."""

    num_stages: int
    max_sessions: int
    context_tokens: int
    hello: Hello
    listen: str = "tcp://127.0.0.1:*"
    advertise_host: str = ""
    max_queue: int = 256
    checkpoints: CheckpointSettings = CheckpointSettings()
    probe_interval_s: float = 10.0  # an idle deployment proves itself this often; 0 = never
    route: Route | None = None  # for those who put something between the stages, such as relays that shape links


class Peers:
    """All sockets of the driver. Belongs to the driver's thread, but for `allow`."""

    def __init__(
        self,
        settings: DriverSettings,
        keys: NodeKeys | None,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        beside: Peers | None = None,
        vocab_size: Callable[[], int] | None = None,
    ) -> None:
        """`beside`: the sockets that serve now and will be succeeded; a context has one authenticator, which they share.

        `vocab_size` is asked when the first token comes: until then the vocabulary may be loading.
        """
        self.settings, self._keys, self._context = settings, keys, context
        self.hello = settings.hello
        self.allowed: AllowList = AllowList() if beside is None else beside.allowed
        self._authenticator = Authenticator(context, self.allowed) if keys is not None and beside is None else None
        self.inbox = Inbox(context, settings.listen, self.hello, keys, self.allowed if keys is not None else None)
        self._outboxes: dict[int, Outbox] = {}
        self.num_stages = settings.num_stages
        self._limits = DriverLimits(
            num_stages=settings.num_stages,
            context_tokens=settings.context_tokens,
            encrypted=keys is not None,
        )
        self._vocab_size: Callable[[], int] | None = vocab_size if beside is None else beside._vocab_size
        self.replicas: dict[int, Ready] = {}  # stages with a second copy that stands by
        self.mirroring = False  # replicas get a copy of everything (hot), or nothing until they are needed (standby)
        self.awaited_replicas = 0  # before the stages are connected for the first time
        self.wanted_replicas = 0  # hot ones are wired in when so many stand by: each wiring is a new epoch
        self._wired: set[int] = set()
        self._replica_outboxes: dict[int, Outbox] = {}
        self.ready: dict[int, Ready] = {}
        self._poller = zmq.Poller()
        self._poller.register(self.inbox.socket, zmq.POLLIN)
        self._ready: set[zmq.Socket[bytes]] = set()

    @property
    def address(self) -> str:
        host = self.settings.advertise_host
        return f"tcp://{host}:{self.inbox.address.rsplit(':', 1)[1]}" if host else self.inbox.address

    def address_for(self, stage: int) -> str:
        """Where a worker reaches the driver."""
        return self._route(stage, DRIVER, self.address)

    def _route(self, source: int, target: int, address: str) -> str:
        return self.settings.route(source, target, address) if self.settings.route is not None else address

    def watch(self, socket: zmq.Socket[bytes]) -> None:
        """Let `wait` return for this socket too."""
        self._poller.register(socket, zmq.POLLIN)

    def unwatch(self, socket: zmq.Socket[bytes]) -> None:
        """No more."""
        self._poller.unregister(socket)

    def succeed(self, old: Peers) -> None:
        """Take over what both shared; the old ones may be closed afterwards."""
        self._authenticator, old._authenticator = old._authenticator, None
        for ready in (*old.ready.values(), *old.replicas.values()):
            if ready.public_key:
                self.allowed.remove(ready.public_key)

    def wait(self, timeout_s: float) -> None:
        """Return as soon as anything can be received; remembers where."""
        self._ready = {socket for socket, _ in self._poller.poll(max(0, round(timeout_s * 1000)))}

    def is_due(self, socket: zmq.Socket[bytes]) -> bool:
        """Whether the latest `wait` found something there."""
        return socket in self._ready

    def receive(self) -> Envelope | None:
        """The next message that makes sense; others are counted as malformed and dropped."""
        while (envelope := self.inbox.receive()) is not None:
            if isinstance(envelope.message, Sampled) and self._vocab_size is not None and not self._limits.vocab_size:
                self._limits = replace(self._limits, vocab_size=self._vocab_size())
            try:
                require_plausible(envelope, self._limits)
            except UsageError as error:
                self.inbox.num_malformed += 1
                if self.inbox.num_malformed <= MAX_TOLD:
                    log.warning("dropped a message of stage %d: %s", envelope.stage, error.one_line())
                continue
            return envelope
        return None

    def set_epoch(self, epoch: int) -> None:
        """A new deployment epoch: workers of the old one are fenced until they are connected again."""
        self.hello = replace(self.hello, epoch=epoch)
        self.inbox.set_hello(self.hello)

    def add(self, ready: Ready) -> None:
        """A worker has reported; it replaces an older one of the same stage."""
        self.drop(ready.stage)
        self.ready[ready.stage] = ready
        outbox = Outbox(self._context, self._route(DRIVER, ready.stage, ready.address), self.hello, self._keys, ready.public_key)
        self._outboxes[ready.stage] = outbox
        self._poller.register(outbox.socket, zmq.POLLIN)

    def drop(self, stage: int) -> None:
        """Forget a worker."""
        self.ready.pop(stage, None)
        outbox = self._outboxes.pop(stage, None)
        if outbox is not None:
            self._poller.unregister(outbox.socket)
            outbox.close(linger_ms=0)

    def add_replica(self, ready: Ready) -> None:
        """A replica stands by."""
        self.drop_replica(ready.stage)
        self._wired.discard(ready.stage)
        self.replicas[ready.stage] = ready
        outbox = Outbox(self._context, self._route(DRIVER, ready.stage, ready.address), self.hello, self._keys, ready.public_key)
        self._replica_outboxes[ready.stage] = outbox
        self._poller.register(outbox.socket, zmq.POLLIN)

    def drop_replica(self, stage: int) -> None:
        """Forget a replica."""
        self.replicas.pop(stage, None)
        outbox = self._replica_outboxes.pop(stage, None)
        if outbox is not None:
            self._poller.unregister(outbox.socket)
            outbox.close(linger_ms=0)

    def promote(self, stage: int) -> None:
        """Let the replica take the place of a lost worker."""
        self.drop(stage)
        self.ready[stage] = self.replicas.pop(stage)
        self._outboxes[stage] = self._replica_outboxes.pop(stage)

    @property
    def complete(self) -> bool:
        return len(self._outboxes) == self.num_stages and len(self.replicas) >= self.awaited_replicas

    @property
    def has_unwired_replica(self) -> bool:
        """Whether a hot replica stands by that its stage's predecessor does not send to yet."""
        return self.mirroring and not set(self.replicas) <= self._wired and len(self.replicas) >= self.wanted_replicas

    def connect_ring(self) -> None:
        """Tell every worker its neighbours."""
        last = self.num_stages - 1
        self._wired = set(self.replicas)
        for stage in range(self.num_stages):
            nxt = self.ready[stage + 1] if stage < last else None
            first = self.ready[0] if stage == last and last > 0 else None
            next_mirror = self.replicas.get(stage + 1) if self.mirroring and nxt else None
            first_mirror = self.replicas.get(0) if self.mirroring and first else None
            self.send(
                stage,
                Connect(
                    epoch=self.hello.epoch,
                    next_address=self._route(stage, stage + 1, nxt.address) if nxt else "",
                    next_key=nxt.public_key if nxt else "",
                    first_address=self._route(stage, 0, first.address) if first else "",
                    first_key=first.public_key if first else "",
                    next_mirror_address=self._route(stage, stage + 1, next_mirror.address) if next_mirror else "",
                    next_mirror_key=next_mirror.public_key if next_mirror else "",
                    first_mirror_address=self._route(stage, 0, first_mirror.address) if first_mirror else "",
                    first_mirror_key=first_mirror.public_key if first_mirror else "",
                ),
            )

    def read_replies(self) -> list[CompatibilityError]:
        """Read the workers' answers to our hello; returns refusals."""
        refusals: list[CompatibilityError] = []
        for outbox in (*self._outboxes.values(), *self._replica_outboxes.values()):
            if outbox.socket not in self._ready:
                continue
            try:
                while outbox.receive() is not None:
                    continue
            except CompatibilityError as error:
                refusals.append(error)
        return refusals

    def read_refusals(self) -> list[CompatibilityError]:
        """Workers that were turned away although they were expected: of this epoch, and of a stage that is not there yet."""
        out: list[CompatibilityError] = []
        while self.inbox.refusals:
            refusal = self.inbox.refusals.popleft()
            hello = refusal.hello
            stale = any(difference.field == "epoch" for difference in refusal.refused.differences)
            if hello is None or stale or hello.stage in self.ready or not 0 <= hello.stage < self.num_stages:
                continue
            where = f"stage {hello.stage}" + (f" on {hello.node}" if hello.node else "")
            out.append(refusal.refused.error(where=where))
        return out

    def send(self, stage: int, message: AnyMessage, payload: bytes | None = None) -> None:
        outbox = self._outboxes.get(stage)
        if outbox is None:
            raise SessionLost(f"stage {stage} is not there")
        outbox.send(message, payload)

    def send_all(self, message: AnyMessage) -> None:
        """To every worker, replicas included."""
        for outbox in self._outboxes.values():
            outbox.send(message)
        for outbox in self._replica_outboxes.values():
            outbox.send(message, required=False)

    def open(self, message: OpenSession) -> None:
        """Begin a session at the first stage, and at its replica."""
        self.send(0, message)
        if self.mirroring and 0 in self._replica_outboxes:
            self._replica_outboxes[0].send(message, required=False)

    def close(self) -> None:
        for stage in list(self._outboxes):
            self.drop(stage)
        for stage in list(self._replica_outboxes):
            self.drop_replica(stage)
        self.inbox.close()
        if self._authenticator is not None:
            self._authenticator.close()
