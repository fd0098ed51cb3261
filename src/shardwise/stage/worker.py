"""StageWorker: the loop of one stage process.

    inbox -> Batcher -> backend.forward -> next stage's inbox            (activations)
                                        -> stage 0 and driver            (last stage: the sampled token)

One thread: receive what waits, choose a batch, compute, send. The next token goes to stage 0 before anything else.

**Promises** a position is computed once per (session, epoch); a closed session frees its KV at once, in every phase; an
error in one session is reported and leaves the others alone. **Fails when** the slice cannot be loaded (`Failure` to the
driver, then exit 1). **Called by** `stage.__main__`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os

import zmq

from shardwise.clock import Clock, SystemClock
from shardwise.errors import PeerClosed, ShardwiseError, UsageError
from shardwise.memory import peak_resident_bytes, resident_bytes
from shardwise.stage.backend import StageBackend
from shardwise.stage.batcher import Batcher, Item
from shardwise.stage.config import WorkerConfig
from shardwise.stage.execute import Executor
from shardwise.stage.heart import Heart
from shardwise.stage.kv_requests import Aside, answer_export, import_state, put_back
from shardwise.stage.links import Links
from shardwise.stage.llama.backend import LlamaCppBackend
from shardwise.stage.obtain import obtain, with_own_hello
from shardwise.stage.resume import adopt, continue_from, on_wanted, refill_mirror
from shardwise.stage.sensible import StageLimits, require_sensible
from shardwise.stage.sent_log import SentLog
from shardwise.stage.sessions import SessionTable, StageSession
from shardwise.stage.stats import WorkerFigures
from shardwise.transport.channel import Envelope
from shardwise.transport.messages import (
    Closed,
    CloseSession,
    Connect,
    ExportKv,
    KvState,
    NewEpoch,
    OpenSession,
    Ping,
    Pong,
    Progress,
    ProgressRequest,
    Ready,
    Sampled,
    Segment,
    Shutdown,
    Stats,
    StatsRequest,
    Step,
    Wanted,
    failure_of,
)
from shardwise.transport.values import MAX_INT

IDLE_WAIT_S = 1.0
GREET_AGAIN_S = 0.02
MAX_TOLD = 20  # malformed messages that are logged

log = logging.getLogger(__name__)


class StageWorker:
    """One stage."""

    def __init__(self, config: WorkerConfig, context: zmq.Context[zmq.Socket[bytes]], clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.is_first, self.is_last = config.stage == 0, config.stage == config.num_stages - 1
        with contextlib.ExitStack() as held:  # undone in reverse if anything here fails
            self.config = config = with_own_hello(config)
            self.links = Links(config, context, self.clock)
            held.callback(self.links.close)
            self.links.await_welcome()
            files = obtain(config, self.links, context, held)
            started_s = self.clock.now_s()
            self.backend: StageBackend = LlamaCppBackend(files, config.settings, main_quantization=config.main_quantization)
            held.callback(self.backend.close)
            self.load_s = self.clock.now_s() - started_s
            self._held = held.pop_all()
        self._limits = StageLimits(
            context_tokens=config.settings.context_tokens,
            max_rows=self.backend.max_rows,
            vocab_size=self.backend.known_vocab_size or MAX_INT,
        )
        self.sessions = SessionTable(config.settings.max_sessions)
        self.batcher = Batcher(num_stages=config.num_stages, max_rows=self.backend.max_rows, deterministic=config.deterministic)
        self.figures = WorkerFigures()
        self.queued: dict[int, int] = {}  # session -> position after the last queued row
        self.sent_log = SentLog(config.sent_log_bytes)
        self.aside = Aside(config.settings.max_sessions)
        self.executor = Executor(self)
        self.heart = Heart(self.config, context, self.clock)
        self._running = True

    # -- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `Shutdown`."""
        self.links.to_driver(self._ready())
        try:
            while self._running:
                waited_s = self._receive_all(wait=not len(self.batcher))
                batch = self.batcher.next_batch(active_sessions=len(self.sessions), prefill_allowed=self.links.prefill_room)
                if batch:
                    self.figures.wait.add(waited_s)
                    self._compute(batch)
                elif len(self.batcher):
                    self.links.wait(IDLE_WAIT_S)  # only prefill waits, and the next stage has no room for it
        finally:
            self.heart.stop()
            self._held.close()

    def _receive_all(self, *, wait: bool) -> float:
        """Handle everything that has arrived; returns how long nothing was there."""
        started_s = self.clock.now_s()
        if self.links.must_greet_again:
            self.links.wait(GREET_AGAIN_S)
            self.links.greet_again()
        else:
            self.links.wait(IDLE_WAIT_S if wait else 0)
        waited_s = self.clock.now_s() - started_s
        for reply in self.links.read_replies():
            if isinstance(reply, Wanted):
                self._on_wanted(reply)
            else:
                self.links.to_driver(reply)
        while self.links.wanted_by_mirror:
            refill_mirror(self, self.links.wanted_by_mirror.pop())
        while (envelope := self.links.inbox.receive()) is not None:
            self._handle(envelope)
        return waited_s

    def _compute(self, batch: list[Item]) -> None:
        try:
            self.executor.run(batch)
        except PeerClosed as error:
            self._report(error, 0, 0)  # a neighbour is gone: the driver decides what happens to the sessions
        except ShardwiseError as error:
            for item in batch:
                self._report(error, item.segment.session, item.segment.epoch)
                self._forget(item.segment.session)
        finally:
            self.release(batch)

    def give_up(self, error: ShardwiseError, segment: Segment) -> None:
        """End one session with an error."""
        self._report(error, segment.session, segment.epoch)
        self._forget(segment.session)

    def release(self, items: list[Item]) -> None:
        """Acknowledge chunks that were computed or dropped: every one that was sent, or the sender's window closes for good."""
        for item in items:
            if item.peer and item.segment.num_tokens > 1:
                self.links.acknowledge(item.peer)

    def _report(self, error: ShardwiseError, session: int, epoch: int) -> None:
        self.links.to_driver(failure_of(error, stage=self.config.stage, session=session, epoch=epoch))

    # -- messages -----------------------------------------------------------------------------------------------

    def _handle(self, envelope: Envelope) -> None:
        message = envelope.message
        try:
            require_sensible(message, self._limits)
        except UsageError as error:
            self._on_malformed(envelope, error)
            return
        match message:
            case Step():
                self._on_step(message, envelope)
            case Sampled():
                self._on_token(message)
            case OpenSession():
                self._on_open(message, envelope.peer)
            case CloseSession():
                self._on_close(message)
            case Ping():
                self.links.to_driver(
                    Pong(
                        stage=self.config.stage,
                        sequence=message.sequence,
                        sent_s=message.sent_s,
                        now_s=self.clock.now_s(),
                        sessions=len(self.sessions),
                    )
                )
            case ProgressRequest():
                positions = tuple((s.opened.session, s.next_position) for s in self.sessions.values())
                self.links.to_driver(Progress(stage=self.config.stage, sequence=message.sequence, positions=positions))
            case StatsRequest():
                self.links.to_driver(self._stats(message))
                if message.reset:
                    self.figures = WorkerFigures()
            case NewEpoch():
                self.links.set_epoch(message.epoch)
                self._hold_all()
                self.heart.set_hello(self.links.hello)
            case Connect():
                self.links.connect(message)
                self._hold_all()
                self.heart.set_hello(self.links.hello)
            case ExportKv():
                answer_export(self, message)
            case KvState():
                import_state(self, message, envelope.payload)
            case Shutdown():
                self._running = False
            case _:
                self.links.inbox.num_malformed += 1  # a message that is not for stages

    def _on_malformed(self, envelope: Envelope, error: UsageError) -> None:
        """A peer's nonsense costs the sessions that it names, as far as they live here; never this stage."""
        inbox, message = self.links.inbox, envelope.message
        inbox.num_malformed += 1
        if inbox.num_malformed <= MAX_TOLD:
            log.warning("a message of stage %d makes no sense: %s", envelope.stage, error.one_line())
        if isinstance(message, Step):
            if any(segment.num_tokens > 1 for segment in message.segments):
                self.links.acknowledge(envelope.peer)  # a chunk: or its sender's window closes for good
            for segment in message.segments:
                if self.sessions.belongs(segment):
                    self.give_up(error, segment)
        elif session := getattr(message, "session", 0):
            self._report(error, session, getattr(message, "epoch", 0))

    def _hold_all(self) -> None:
        """Compute nothing more until the sessions are opened again: rows sent to a new neighbour would follow lost ones."""
        self.release(self.batcher.discard(lambda segment: False))
        self.queued = {session.opened.session: session.next_position for session in self.sessions.values()}
        self.aside.clear()

    def _on_step(self, step: Step, envelope: Envelope) -> None:
        now_s = self.clock.now_s()
        try:
            rows_TH = self.executor.unpack(step, envelope.payload)
        except UsageError as error:
            self._on_malformed(envelope, error)
            return
        row = 0
        for segment, visits in zip(step.segments, itertools.chain(step.visits, itertools.repeat(()))):
            x_TH = rows_TH[row : row + segment.num_tokens]
            row += segment.num_tokens
            self.enqueue(Item(segment, x_TH, (), now_s, visits, envelope.peer))
        if all(segment.num_tokens == 1 for segment in step.segments):
            self.figures.transfer.add(now_s - step.sent_s)

    def _on_token(self, sampled: Sampled) -> None:
        """The ring: a new token for stage 0."""
        found = self.sessions.get(sampled.session)
        if found is None or found.opened.epoch != sampled.epoch:
            self.figures.num_fenced += 1
            return
        now_s = self.clock.now_s()
        self.figures.transfer.add(now_s - sampled.sent_s)
        segment = Segment(
            session=sampled.session,
            epoch=sampled.epoch,
            position=sampled.position,
            num_tokens=1,
            sample=True,
            traced=found.opened.traced,
        )
        self.enqueue(Item(segment, None, (sampled.token,), now_s))

    def enqueue(self, item: Item) -> None:
        """Queue rows that are due; drop duplicates and what belongs to an epoch that is over; report a gap."""
        segment = item.segment
        if not self.sessions.belongs(segment):
            self.figures.num_fenced += 1
            self.release([item])
            return
        try:
            if not self.sessions.check(segment, self.queued[segment.session]):
                self.figures.num_duplicates += 1
                self.release([item])
                return
        except ShardwiseError as error:
            self.release([item])
            if not self.links.muted:  # a replica that fell behind is refilled when it is needed
                self._report(error, segment.session, segment.epoch)
            return
        self.queued[segment.session] = segment.position + segment.num_tokens
        self.batcher.add(item)

    def _on_open(self, message: OpenSession, peer: bytes) -> None:
        if self.sessions.is_over(message.session):
            return
        old = self.sessions.get(message.session)
        if old is not None and old.opened.epoch >= message.epoch:
            self.figures.num_duplicates += 1
            return
        try:
            if old is not None and message.resume:
                adopt(self, old, message)
                session = old
            else:
                self._forget(message.session)
                session = self.sessions.open(message)
                put_back(self, session)
                self.queued[message.session] = session.next_position
            session.upstream = peer
            self._begin(session)
        except ShardwiseError as error:
            self._report(error, message.session, message.epoch)
            self._forget(message.session)

    def _begin(self, session: StageSession) -> None:
        opened = session.opened
        if self.is_last:
            session.history = list(opened.tokens)
            if session.sampler is not None:
                session.sampler.close()
            generated = opened.tokens[opened.num_prompt :]
            session.sampler = self.backend.sampler(opened.sampling, generated)
        else:
            self.links.forward(opened)  # ahead of the rows, on the same connection: they never meet a stranger
        if opened.resume:
            if self.is_last or self.links.muted:  # a replica has no successor to wait for
                continue_from(self, session)
        elif self.is_first:
            self.enqueue_tokens(opened)

    def enqueue_tokens(self, opened: OpenSession) -> None:
        """Stage 0: queue the session's tokens from `start_position` on."""
        for segment, tokens in prompt_segments(opened, self.config.settings.chunk_tokens):
            self.enqueue(Item(segment, None, tokens, self.clock.now_s()))

    def _on_wanted(self, message: Wanted) -> None:
        try:
            on_wanted(self, message)
        except ShardwiseError as error:
            self._report(error, message.session, message.epoch)

    def _on_close(self, message: CloseSession) -> None:
        self.sessions.end(message.session)
        found = self.sessions.get(message.session)
        if found is not None and found.opened.epoch <= message.epoch:
            self._forget(message.session)
        self.links.to_driver(Closed(session=message.session, stage=self.config.stage))

    def _forget(self, session: int) -> None:
        found = self.sessions.close(session)
        self.sent_log.forget(session)
        self.queued.pop(session, None)
        self.release(self.batcher.discard(lambda segment: segment.session != session))
        if found is not None:
            if found.sampler is not None:
                found.sampler.close()
            self.backend.rollback(found.slot, 0)

    # -- reports ------------------------------------------------------------------------------------------------

    def _ready(self) -> Ready:
        memory = self.backend.memory
        return Ready(
            stage=self.config.stage,
            pid=os.getpid(),
            address=self.links.address,
            load_s=self.load_s,
            weight_bytes=memory.weight_bytes,
            kv_bytes=memory.kv_bytes,
            workspace_bytes=memory.workspace_bytes,
            library=self.backend.library,
            public_key=self.config.public_key,
            replica=self.config.replica,
        )

    def _stats(self, request: StatsRequest) -> Stats:
        figures = self.figures
        return Stats(
            stage=self.config.stage,
            sequence=request.sequence,
            pid=os.getpid(),
            sessions=len(self.sessions),
            kv_tokens=sum(s.next_position for s in self.sessions.values()),
            peak_memory_bytes=peak_resident_bytes(),
            memory_bytes=resident_bytes(),
            prefill=figures.prefill.quantiles(),
            decode=figures.decode.quantiles(),
            wait=figures.wait.quantiles(),
            queue=figures.queue.quantiles(),
            transfer=figures.transfer.quantiles(),
            copy=figures.copy.quantiles(),
            decode_rows=figures.decode_rows,
            prefill_tokens=figures.prefill_tokens,
            received_bytes=self.links.inbox.received_bytes,
            sent_bytes=self.links.sent_bytes,
            decode_sent_bytes=figures.decode_sent_bytes,
            decode_steps_sent=figures.decode_steps_sent,
            now_s=self.clock.now_s(),
        )


def prompt_segments(opened: OpenSession, chunk_tokens: int) -> list[tuple[Segment, tuple[int, ...]]]:
    """How stage 0 cuts the tokens of a session: the prompt in chunks, what was generated already in single rows.

    These are the shapes of an undisturbed run, so that a replay gives the same bits; with `fast_replay` everything is
    cut into chunks. Only the last row's logits are wanted.
    """
    total = len(opened.tokens)
    chunked = total if opened.fast_replay else opened.num_prompt
    out: list[tuple[Segment, tuple[int, ...]]] = []
    position = opened.start_position
    while position < total:
        end = min(position - position % chunk_tokens + chunk_tokens, chunked) if position < chunked else position + 1
        segment = Segment(
            session=opened.session,
            epoch=opened.epoch,
            position=position,
            num_tokens=end - position,
            sample=end == total,
            traced=opened.traced,
        )
        out.append((segment, opened.tokens[position:end]))
        position = end
    return out
