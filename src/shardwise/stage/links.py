"""A worker's connections: its inbox, the driver, the next stage, and from the last stage back to the first.

Backpressure: the next stage acknowledges every prefill chunk that it has computed; at most `prefill_window`
chunks are under way, so a slow stage never collects an unbounded queue. Decode rows are bounded by the sessions.
"""

from __future__ import annotations

import zmq

from shardwise.clock import Clock
from shardwise.errors import CompatibilityError, ReplyTimeout
from shardwise.records import replace
from shardwise.stage.config import WorkerConfig
from shardwise.transport.channel import Inbox, Outbox
from shardwise.transport.handshake import Hello
from shardwise.transport.messages import AnyMessage, Connect, Connected, Failure, OpenSession, Taken, Wanted, failure_of
from shardwise.transport.security.allow_list import AllowList
from shardwise.transport.security.authenticator import Authenticator
from shardwise.transport.security.keys import NodeKeys

WELCOME_TIMEOUT_S = 60.0
CHECK_MS = 200
FENCED_S = 15.0  # a worker whose driver went on without it ends after this, unless it is told of the new epoch


def epochs_ahead(error: CompatibilityError) -> int:
    """By how much our epoch is ahead of the peer's (after a fault, for a moment; negative: behind), where that is the only
    difference; 0 where it is not."""
    differences = [d for d in error.details.get("differences", []) if d["field"] != "manifest_digest"]
    if len(differences) != 1 or differences[0]["field"] != "epoch":
        return 0
    return int(differences[0]["own"]) - int(differences[0]["peer"])


class Links:
    """All sockets of one worker."""

    def __init__(self, config: WorkerConfig, context: zmq.Context[zmq.Socket[bytes]], clock: Clock) -> None:
        self._config, self._context, self._clock = config, context, clock
        self._hello = config.hello
        self._keys = NodeKeys(config.public_key, config.secret_key) if config.public_key else None
        self._authenticator = self._start_authenticator()
        allowed = self._authenticator.allowed if self._authenticator is not None else None
        self.inbox = Inbox(context, config.listen, self._hello, self._keys, allowed)
        self._driver = Outbox(context, config.driver_address, self._hello, self._keys, config.driver_key)
        self._next: Outbox | None = None
        self._first: Outbox | None = None
        self._next_mirror: Outbox | None = None
        self._first_mirror: Outbox | None = None
        self.muted = config.replica
        self.wanted_by_mirror: list[Wanted] = []
        self._announce: Connected | None = None
        self._greet_again: set[Outbox] = set()
        self._under_way = 0
        self._fenced: tuple[CompatibilityError, float] | None = None  # the driver went on without us: its words, since when
        self._replies_due = False
        self._poller = zmq.Poller()
        for socket in (self.inbox.socket, self._driver.socket):
            self._poller.register(socket, zmq.POLLIN)

    def _start_authenticator(self) -> Authenticator | None:
        if self._keys is None:
            return None
        allowed = AllowList()
        for peer in self._config.allowed:
            allowed.allow(peer.public, peer.name)
        return Authenticator(self._context, allowed)

    @property
    def hello(self) -> Hello:
        """What this worker holds now."""
        return self._hello

    @property
    def address(self) -> str:
        """What others connect to."""
        host = self._config.advertise_host
        if not host:
            return self.inbox.address
        return f"tcp://{host}:{self.inbox.address.rsplit(':', 1)[1]}"

    def await_welcome(self) -> None:
        """Before anything is loaded: the driver's answer to our hello. Raises what it objects to, or `ReplyTimeout`."""
        deadline_s = self._clock.now_s() + WELCOME_TIMEOUT_S
        while not self._driver.welcomed:
            left_s = deadline_s - self._clock.now_s()
            if left_s <= 0:
                raise ReplyTimeout(
                    f"the driver did not answer within {WELCOME_TIMEOUT_S:.0f} s", where=self._config.driver_address
                )
            self._driver.socket.poll(min(round(left_s * 1000), CHECK_MS))
            self._driver.receive()
            self._driver.check()

    def wait(self, timeout_s: float) -> None:
        """Return as soon as anything can be received. 0: only look where."""
        ready = self._poller.poll(round(timeout_s * 1000))
        self._replies_due = any(socket is not self.inbox.socket for socket, _ in ready)

    # -- neighbours ---------------------------------------------------------------------------------------------

    def connect(self, message: Connect) -> None:
        """Take new neighbours; the old connections are dropped."""
        if self.muted:  # a replica is promoted
            self.muted = False
            self._hello = replace(self._hello, stage=self._config.stage, epoch=message.epoch)
            self.inbox.set_hello(self._hello)
            self._driver.greet(self._hello)
        self.set_epoch(message.epoch)
        self._next_mirror = self._replace(self._next_mirror, message.next_mirror_address, message.next_mirror_key)
        self._first_mirror = self._replace(self._first_mirror, message.first_mirror_address, message.first_mirror_key)
        self._next = self._replace(self._next, message.next_address, message.next_key)
        self._first = self._replace(self._first, message.first_address, message.first_key)
        self._under_way = 0
        self._announce = Connected(stage=self._config.stage, epoch=message.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Go on under a higher epoch: neighbours must greet again, and the driver is greeted."""
        if epoch > self._hello.epoch:
            self._fenced = None
            self._hello = replace(self._hello, epoch=epoch)
            self.inbox.set_hello(self._hello)
            self._driver.greet(self._hello)

    def _replace(self, old: Outbox | None, address: str, key: str) -> Outbox | None:
        if old is not None:
            self._poller.unregister(old.socket)
            old.close(linger_ms=0)
        if not address:
            return None
        outbox = Outbox(self._context, address, self._hello, self._keys, key)
        self._poller.register(outbox.socket, zmq.POLLIN)
        return outbox

    def read_replies(self) -> list[AnyMessage]:
        """Take what `wait` saw from neighbours and driver; returns what the worker should handle or the driver should hear."""
        out: list[AnyMessage] = []
        if self._replies_due:
            self._replies_due = False
            self._read_all(out)
        self._end_if_fenced()
        if self._announce is not None and all(o is None or o.welcomed for o in (self._next, self._first)):
            out.append(self._announce)
            self._announce = None
        return out

    def _read_all(self, out: list[AnyMessage]) -> None:
        for outbox in (self._driver, self._next, self._first):
            try:
                while outbox is not None and (message := outbox.receive()) is not None:
                    if isinstance(message, Wanted):
                        out.append(message)
                    else:
                        self._under_way = max(0, self._under_way - 1)
            except CompatibilityError as error:
                ahead = epochs_ahead(error)
                if outbox is self._driver:
                    if ahead >= 0:
                        raise  # this worker is not wanted: of an old launch, or not what was ordered
                    self._fenced = self._fenced or (error, self._clock.now_s())
                elif outbox is not None and ahead > 0:
                    self._greet_again.add(outbox)
                elif ahead == 0:  # behind: a new epoch and new neighbours are on their way
                    out.append(self._refused(error))
        for mirror in (self._next_mirror, self._first_mirror):
            self._read_mirror(mirror)

    def _end_if_fenced(self) -> None:
        """A driver that has gone on sends the new epoch at once to whomever it still wants."""
        if self._fenced is not None and self._clock.now_s() - self._fenced[1] > FENCED_S:
            raise self._fenced[0]

    def _read_mirror(self, mirror: Outbox | None) -> None:
        """A replica's acknowledgements are of no interest; one that refuses simply gets nothing that it takes."""
        try:
            while mirror is not None and (message := mirror.receive()) is not None:
                if isinstance(message, Wanted):
                    self.wanted_by_mirror.append(message)
        except CompatibilityError as error:
            if mirror is not None and epochs_ahead(error) > 0:
                self._greet_again.add(mirror)

    def greet_again(self) -> None:
        """Try again at peers that had not heard of the new epoch yet."""
        for outbox in self._greet_again:
            if outbox in (self._driver, self._next, self._first, self._next_mirror, self._first_mirror):
                outbox.greet(self._hello)
        self._greet_again.clear()

    @property
    def must_greet_again(self) -> bool:
        return bool(self._greet_again)

    def _refused(self, error: CompatibilityError) -> Failure:
        return failure_of(error, stage=self._config.stage)

    @property
    def prefill_room(self) -> bool:
        """Whether another chunk may be sent on."""
        return self._next is None or self._under_way < self._config.prefill_window

    def acknowledge(self, peer: bytes) -> None:
        """Tell the previous stage that its chunk has been computed."""
        self.inbox.reply(peer, Taken(stage=self._config.stage))

    # -- sending ------------------------------------------------------------------------------------------------

    def to_driver(self, message: AnyMessage, payload: bytes | memoryview | None = None) -> None:
        self._driver.send(message, payload)

    def to_next(self, message: AnyMessage, payload: bytes | memoryview, *, prefill: bool) -> int:
        """Bytes sent; none while this worker stands by."""
        if self.muted:
            return 0
        assert self._next is not None
        if prefill:
            self._under_way += 1
        size = self._next.send(message, payload)
        if self._next_mirror is not None:
            self._next_mirror.send(message, payload, required=False)
        return size

    def to_next_mirror(self, message: AnyMessage, payload: bytes | memoryview) -> None:
        """To the next stage's replica only."""
        if self._next_mirror is not None:
            self._next_mirror.send(message, payload, required=False)

    def forward(self, message: OpenSession) -> None:
        """Pass a session's opening on to the next stage."""
        if self.muted:
            return
        assert self._next is not None
        self._next.send(message)
        if self._next_mirror is not None:
            self._next_mirror.send(message, required=False)

    def to_first(self, message: AnyMessage) -> int:
        if self.muted:
            return 0
        assert self._first is not None
        size = self._first.send(message)
        if self._first_mirror is not None:
            self._first_mirror.send(message, required=False)
        return size

    @property
    def sent_bytes(self) -> int:
        return sum(o.sent_bytes for o in (self._driver, self._next, self._first) if o is not None)

    def close(self) -> None:
        for outbox in (self._driver, self._next, self._first, self._next_mirror, self._first_mirror):
            if outbox is not None:
                outbox.close()
        self.inbox.close()
        if self._authenticator is not None:
            self._authenticator.close()
