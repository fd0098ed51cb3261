"""The session driver: one thread that opens sessions on the stages and hands their tokens out.

    submit -> queue -> (a slot is free) -> OpenSession to stage 0, which passes it on -> tokens -> on_event
    cancel, disconnect, end, fault -> CloseSession to every stage -> slot free again

The data path does not pass through here: stages talk to each other, and the driver only receives token ids.

**Promises** events of a session come in order, from the driver's thread, and end with exactly one final event (a token with
`finish_reason`, or an error); a cancelled session's KV is freed on every stage; at most `max_sessions` are open and
`max_queue` wait. **Fails when** the queue is full (`QueueFull`), the prompt does not fit (`ContextFull`), a stage is lost
(`SessionLost`). **Called by** `deploy`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

import zmq

from shardwise.clock import Clock, SystemClock
from shardwise.errors import NetworkError, QueueFull, ReplyTimeout, SessionLost, ShardwiseError, from_record
from shardwise.session.bell import Bell
from shardwise.session.broken import serve_nothing
from shardwise.session.clock_offsets import ClockOffsets
from shardwise.session.handle import SessionHandle
from shardwise.session.incoming import Incoming
from shardwise.session.journal import Journal, Unfinished
from shardwise.session.journalling import Journalling
from shardwise.session.peers import DriverSettings, Peers
from shardwise.session.readiness import readiness_of
from shardwise.session.request import GenerationRequest, Readiness, Recovery, check_request
from shardwise.session.restoring import Restoring
from shardwise.session.session import OnEvent, Session
from shardwise.session.step_history import StepHistory
from shardwise.session.text import Tokenizer
from shardwise.transport.channel import Envelope
from shardwise.transport.handshake import REPLICA_STAGE
from shardwise.transport.messages import (
    AnyMessage,
    Closed,
    CloseSession,
    Connected,
    Failure,
    KvState,
    NewEpoch,
    Ping,
    Pong,
    Preparing,
    Progress,
    Ready,
    Sampled,
    Shutdown,
    Stats,
    StatsRequest,
)
from shardwise.transport.promptness import prefer_promptness
from shardwise.transport.security.keys import NodeKeys

IDLE_WAIT_S = 0.25


class Driver:
    """See the module."""

    def __init__(
        self,
        settings: DriverSettings,
        tokenizer: Tokenizer,
        keys: NodeKeys | None,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Clock | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self.clock = clock or SystemClock()
        self.peers = Peers(settings, keys, context, vocab_size=lambda: tokenizer.vocab_size)
        self.journal = journal
        self.journalling = Journalling(journal)
        self.restoring = Restoring(self)
        self.open_sessions: dict[int, Session] = {}
        self.waiting: deque[Session] = deque()
        self.closing: dict[int, set[int]] = {}  # session -> stages that still hold it
        self.offsets = ClockOffsets()
        self.last_token_s: float | None = None
        self.failure: ShardwiseError | None = None
        self.num_stages = settings.num_stages
        self.on_stage_lost: Callable[[int, ShardwiseError], None] | None = None  # set by whoever can recover
        self.heard_s: dict[int, float] = {}  # stage -> our clock at its last sign of life
        self.looked_s = 0.0  # our clock when everything that had arrived was last handled
        self.progress: dict[int, Progress] = {}
        self.preparing: dict[int, Preparing] = {}  # stage -> how far it is with fetching or verifying its slice
        self.recoveries: list[Recovery] = []
        self.recovering = ""  # what is being done about a fault; sessions are held meanwhile
        self.incoming: Incoming | None = None  # the stages of a new split, until they take over
        self.latest_stats: dict[int, Stats] = {}
        self.step_history = StepHistory()
        self._grade, self._predicted_stall_s = "exact", 0.0
        self._connected: set[int] = set()
        self._stats: dict[int, dict[int, Stats]] = {}
        self._changed = threading.Condition()
        self.calls: deque[Callable[[], None]] = deque()
        self._numbers = iter(range(journal.next_session if journal is not None else 1, 2**63))
        self.bell = Bell(context)
        self.peers.watch(self.bell.socket)
        self.running = True
        self._thread = threading.Thread(target=self._run, name="session-driver", daemon=True)

    # -- from any thread ----------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def call(self, action: Callable[[], None]) -> None:
        """Run something in the driver's thread."""
        self.calls.append(action)
        self.bell.ring()

    def submit(self, request: GenerationRequest, on_event: OnEvent) -> SessionHandle:
        """Begin a generation; raises `QueueFull`, `ContextFull` or `UsageError` at once, everything later is an event."""
        self._check(request)
        session = Session(next(self._numbers), request, self.tokenizer, on_event, self.clock.now_s())
        self.call(lambda: self._admit(session))
        return SessionHandle(self, session)

    def resume(self, unfinished: Unfinished, on_event: OnEvent) -> SessionHandle:
        """Go on with a session of an earlier driver's journal; only tokens that are new are events."""
        session = Session(next(self._numbers), unfinished.request, self.tokenizer, on_event, self.clock.now_s())
        session.restore(unfinished.generated)
        self.call(lambda: self._admit(session, instead_of=unfinished.session))
        return SessionHandle(self, session)

    def _check(self, request: GenerationRequest) -> None:
        if self.failure is not None:
            raise self.failure
        check_request(request, self.settings.context_tokens)
        if len(self.waiting) >= self.settings.max_queue:
            raise QueueFull(f"{len(self.waiting)} requests are waiting already", hint="try again later")

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Block until `condition` holds; raises the deployment's failure, or `ReplyTimeout`."""
        with self._changed:
            done = self._changed.wait_for(lambda: condition() or self.failure is not None, timeout_s)
        if self.failure is not None:
            raise self.failure
        if not done:
            raise ReplyTimeout(f"{what} took more than {timeout_s:.0f} s")

    @property
    def clock_error_s(self) -> dict[int, float]:
        """Stage -> how far its estimated clock offset can be off."""
        return self.offsets.error_s

    @property
    def clock_offset_s(self) -> dict[int, float]:
        """Stage -> its clock minus ours."""
        return self.offsets.offset_s

    def wait_changed(self, timeout_s: float) -> None:
        """Return when a message has been handled, or after `timeout_s`."""
        with self._changed:
            self._changed.wait(timeout_s)

    @property
    def connected(self) -> bool:
        """Whether every stage has its neighbours."""
        return len(self._connected) == self.num_stages

    def stats(self, *, reset: bool = False, timeout_s: float = 10.0) -> list[Stats]:
        """The figures of all stages, in order."""
        sequence = next(self._numbers)
        self._stats[sequence] = {}
        self.call(lambda: self.peers.send_all(StatsRequest(sequence=sequence, reset=reset)))
        try:
            self.wait_until(lambda: len(self._stats[sequence]) == self.num_stages, timeout_s, "asking the stages for figures")
            return [self._stats[sequence][stage] for stage in range(self.num_stages)]
        finally:
            del self._stats[sequence]

    def readiness(self) -> Readiness:
        """Ready means that a token came through every stage within the last three probe intervals."""
        return readiness_of(self)

    def close(self) -> None:
        """End every session and worker; bounded."""
        if self._thread.is_alive():
            self.call(self._stop)
            self._thread.join(timeout=15)
        else:
            self.journalling.close()  # it was never started
        self.bell.close()

    # -- the driver's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        prefer_promptness()
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001  a silent end would let every session hang
            serve_nothing(self, error)
        finally:
            with contextlib.ExitStack() as ends:
                for end in (self.journalling.close, self.restoring.checkpoints.close, self.peers.close, self.drop_incoming):
                    ends.callback(end)
                ends.callback(self.bell.close_socket)

    def _serve(self) -> None:
        next_probe_s = self.clock.now_s()
        while self.running:
            self.peers.wait(IDLE_WAIT_S)
            if self.peers.is_due(self.bell.socket):
                self.bell.silence()
            while self.calls:
                self.calls.popleft()()
            for refusal in [*self.peers.read_replies(), *self.peers.read_refusals()]:
                if self.on_stage_lost is None:  # a supervised worker that is refused ends, and is replaced
                    self.fail_all(refusal)
            while (envelope := self.peers.receive()) is not None:
                self._handle(envelope)
            if self.incoming is not None and self.incoming.serve():
                with self._changed:
                    self._changed.notify_all()
            self.looked_s = self.clock.now_s()
            if self.connected and self.settings.probe_interval_s and self.clock.now_s() >= next_probe_s:
                next_probe_s = self.clock.now_s() + self.settings.probe_interval_s
                self.journalling.try_again()
                self._probe()

    def _stop(self) -> None:
        self.running = False
        for session in [*self.open_sessions.values(), *self.waiting]:
            session.cancel(self.clock.now_s())
        self.peers.send_all(Shutdown())

    def _handle(self, envelope: Envelope) -> None:
        message = envelope.message
        self.heard_s[envelope.stage] = self.clock.now_s()
        if envelope.stage >= REPLICA_STAGE:
            self._on_replica(message)
            return
        match message:
            case Sampled():
                self._on_token(message)
            case Ready():
                self._on_ready(message)
            case Connected():
                self._on_connected(message)
            case Pong():
                self._on_pong(message)
            case Stats():
                if message.decode.n or message.stage not in self.latest_stats:
                    self.latest_stats[message.stage] = message
                if message.sequence in self._stats:
                    self._stats[message.sequence][message.stage] = message
            case Failure():
                self._on_failure(message)
            case Closed():
                self._on_closed(message)
            case Progress():
                self.progress[message.stage] = message
            case Preparing():
                self.preparing[message.stage] = message
            case KvState():
                self.restoring.on_kv(message, envelope.payload)
            case _:
                pass  # hearts beat already
        with self._changed:
            self._changed.notify_all()

    def _on_replica(self, message: AnyMessage) -> None:
        """All that a replica has to say is that it stands by; hot ones are wired in at once."""
        if isinstance(message, Ready):
            self.peers.add_replica(message)
            if not self._connected and self.peers.complete:
                self.peers.connect_ring()
            elif self.peers.has_unwired_replica and self.connected and not self.recovering:
                self.begin_recovery("", "replica added", ())
        with self._changed:
            self._changed.notify_all()

    def _on_ready(self, ready: Ready) -> None:
        self.peers.add(ready)
        self._connected.discard(ready.stage)
        if self.peers.complete:
            self.peers.connect_ring()

    def _on_connected(self, message: Connected) -> None:
        if message.epoch != self.peers.hello.epoch or message.stage not in self.peers.ready:
            return
        self._connected.add(message.stage)
        self.peers.send(message.stage, Ping(sequence=0, sent_s=self.clock.now_s()))
        if self.connected:
            self.peers.awaited_replicas = 0
            if self.recovering:
                self._resume_sessions()
            self._open_waiting()
            if self.peers.has_unwired_replica:
                self.begin_recovery("", "replica added", ())

    # -- recovery -----------------------------------------------------------------------------------------------

    def begin_recovery(
        self,
        cause: str,
        what: str,
        lost: tuple[int, ...],
        grade: str = "exact",
        *,
        promote: bool = False,
        predicted_stall_s: float = 0.0,
    ) -> int:
        """Hold all sessions and fence the lost stages under a new epoch, which is returned. Driver's thread."""
        self.recovering, self._grade, self._predicted_stall_s = what, grade, predicted_stall_s
        for session in self.open_sessions.values():
            if cause:
                session.interrupt(cause)
        self.restoring.blame(cause)
        self.peers.set_epoch(self.peers.hello.epoch + 1)
        self._connected.clear()
        self.closing.clear()  # answers of before are fenced
        self.restoring.begin(() if promote and self.peers.mirroring else lost)
        for stage in self.heard_s:  # whoever lives has to greet again before it is heard
            self.heard_s[stage] = self.clock.now_s()
        for stage in lost:
            if promote and stage in self.peers.replicas:
                self.peers.promote(stage)
                self.heard_s[stage] = self.clock.now_s()
            else:
                self.peers.drop(stage)
                self.heard_s.pop(stage, None)
        self.peers.send_all(NewEpoch(epoch=self.peers.hello.epoch))
        if (promote or not lost) and self.peers.complete:  # only the connections are made anew
            self.peers.connect_ring()
        return self.peers.hello.epoch

    def _resume_sessions(self, *, replay: bool = False) -> None:
        """Every stage stands again: let the sessions go on where the driver's tokens end. `replay`: no stage knows them."""
        what, self.recovering = self.recovering, ""
        self.restoring.reopen_all(what, self._grade, self._predicted_stall_s, replay=replay)

    def expect(self, peers: Peers) -> Incoming:
        """Let the workers of a new split come up; its sockets belong to the driver's thread from now on."""
        incoming = Incoming(peers, self.clock)

        def begin() -> None:
            self.peers.watch(peers.inbox.socket)
            self.incoming = incoming

        self.call(begin)
        return incoming

    def drop_incoming(self) -> None:
        """The new split is not wanted any more. Driver's thread."""
        if self.incoming is not None:
            self.peers.unwatch(self.incoming.peers.inbox.socket)
            self.incoming.peers.send_all(Shutdown())
            self.incoming.peers.close()
            self.incoming = None

    def switch(self, what: str, grade: str, predicted_stall_s: float) -> None:
        """The new split takes over: the old workers end, every session is replayed on the new ones. Driver's thread."""
        incoming = self.incoming
        if incoming is None or not incoming.complete:
            raise SessionLost("the new split is not ready", where="switch")
        for session in self.open_sessions.values():
            session.interrupt(what)
        old, self.peers, self.incoming = self.peers, incoming.peers, None
        self.peers.succeed(old)
        self.peers.watch(self.bell.socket)
        old.send_all(Shutdown())
        old.close()
        self.settings, self.num_stages = self.peers.settings, self.peers.num_stages
        self.heard_s = dict.fromkeys(range(self.num_stages), self.clock.now_s())
        self._connected = set(incoming.connected)
        self.progress, self.preparing, self.latest_stats, self.offsets = {}, {}, {}, ClockOffsets()
        self.restoring.checkpoints.new_split()
        for stage in range(self.num_stages):
            self.peers.send(stage, Ping(sequence=0, sent_s=self.clock.now_s()))
        self.recovering, self._grade, self._predicted_stall_s = self.recovering or what, grade, predicted_stall_s
        for session in list(self.open_sessions.values()):
            if not self.journalling.begin(session, self.settings.hello.manifest_digest):
                self.end(session, cancelled=False)
        self._resume_sessions(replay=True)
        self._open_waiting()

    def send_open(self, session: Session, *, resume: bool) -> None:
        """Driver's thread."""
        try:
            self.peers.open(session.opening(resume=resume, fast=self._grade == "fast" and not session.restored_tokens))
        except (NetworkError, SessionLost) as error:
            self._stage_lost(0, error)

    def _on_pong(self, pong: Pong) -> None:
        now_s = self.clock.now_s()
        if self.offsets.take(pong, now_s) and pong.stage in self.peers.ready:
            self.peers.send(pong.stage, Ping(sequence=pong.sequence + 1, sent_s=now_s))

    def _admit(self, session: Session, *, journalled: bool = True, instead_of: int = 0) -> None:
        session.journalled = self.journal is not None and journalled
        if self.failure is not None:
            session.fail(self.failure)
        elif self.journalling.begin(session, self.settings.hello.manifest_digest):
            if instead_of:
                self.journalling.over(instead_of, "resumed")
            self.waiting.append(session)
            self._open_waiting()
        else:
            self.journalling.ended(session, "error")

    def _num_held(self) -> int:
        return len(self.open_sessions) + len(self.closing)

    def _on_closed(self, closed: Closed) -> None:
        left = self.closing.get(closed.session, {closed.stage})
        left.discard(closed.stage)
        if not left:
            self.closing.pop(closed.session, None)
        self._open_waiting()

    def _open_waiting(self) -> None:
        while self.waiting and self.connected and not self.recovering and self._num_held() < self.settings.max_sessions:
            session = self.waiting.popleft()
            if not session.finished:
                self.open_sessions[session.number] = session
                self.open_on_stages(session)

    def open_on_stages(self, session: Session) -> None:
        """Open on stage 0; the message travels through the stages ahead of the session's rows."""
        self.restoring.open(session)

    def _on_token(self, sampled: Sampled) -> None:
        session = self.open_sessions.get(sampled.session)
        if session is None:
            return
        self.last_token_s = self.clock.now_s()
        known, gap_s = len(session.recoveries), self.last_token_s - session.last_event_s
        try:
            self.journalling.token(session, sampled)
        except SessionLost as error:
            session.fail(error)
            self.end(session, cancelled=False)
            return
        if session.accept(sampled, self.last_token_s):
            self.recoveries += session.recoveries[known:]
            if len(session.recoveries) == known and len(session.generated) > 1:
                self.step_history.add(gap_s)
            if session.finished:
                self.end(session, cancelled=False)
            else:
                self.restoring.after_token(session)

    def end(self, session: Session, *, cancelled: bool) -> None:
        """Free a session everywhere."""
        if cancelled:
            session.cancel(self.clock.now_s())
        self.journalling.ended(session, "cancelled" if cancelled else "finished")
        self.restoring.checkpoints.forget(session, self.num_stages)
        if self.open_sessions.pop(session.number, None) is not None:
            self.closing[session.number] = set(range(self.num_stages))  # its slots are free when every stage has said so
            self.peers.send_all(CloseSession(session=session.number, epoch=session.epoch))
        self.restoring.over(session)
        self._open_waiting()

    def _on_failure(self, failure: Failure) -> None:
        error = from_record(failure.kind, failure.message, failure.where, failure.hint, dict(failure.details))
        if failure.session == 0:
            self._stage_lost(failure.stage, error)
            return
        session = self.open_sessions.get(failure.session)
        if session is not None and session.epoch == failure.epoch and not self.recovering:  # else about to be opened again
            self.restoring.on_failure(session, failure, error)

    def _stage_lost(self, stage: int, error: ShardwiseError) -> None:
        if self.on_stage_lost is not None:
            self.on_stage_lost(stage, error)
            return
        self._connected.discard(stage)
        self.fail_all(error)

    def fail_all(self, error: ShardwiseError) -> None:
        """The deployment cannot go on: every session ends with the error, and so does every later request."""
        self.failure = self.failure or error
        for session in [*self.open_sessions.values(), *self.waiting]:
            session.fail(error)
        self.open_sessions.clear()
        self.waiting.clear()
        with self._changed:
            self._changed.notify_all()

    def _probe(self) -> None:
        """Prove that generation works: one token of a tiny session, unless tokens flow anyway."""
        recent = self.last_token_s is not None and self.clock.now_s() - self.last_token_s < self.settings.probe_interval_s / 2
        if self.open_sessions or self.waiting or recent:
            return
        request = GenerationRequest(prompt=(0,), max_tokens=1, ignore_eos=True)
        self._admit(Session(next(self._numbers), request, self.tokenizer, lambda _: None, self.clock.now_s()), journalled=False)
