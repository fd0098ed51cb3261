"""Opening sessions again after a fault, with checkpoints where there are some.

    all stages stand -> sessions whose turn it is (`suspects`)
    for each session: checkpoints of the rebuilt stages -> they say that they hold them -> OpenSession(resume)
                                          none, or one that a stage cannot take -> OpenSession(resume) at once: rows are refilled

**Promises** a session is opened once for every fault; one during whose steps stages were lost three times without a token between
ends with `SessionLost`. **Fails when** never: what cannot be restored is computed again.
**Called by** the session driver, in its thread.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from shardwise.errors import SessionLost, ShardwiseError
from shardwise.records import Record
from shardwise.session.checkpoints import Checkpoints
from shardwise.session.session import Session
from shardwise.session.suspects import MOST_LOSSES, Suspects, may_be_a_session
from shardwise.transport.messages import KV_STATE, REFILL_IMPOSSIBLE, Failure, KvState

if TYPE_CHECKING:
    from shardwise.session.driver import Driver


class Held(Record):
    """How a session is to be opened when its turn comes."""

    empty: frozenset[int] = frozenset()  # stages that have lost what they had computed of it
    exact: bool = True  # stages that know it keep what they have
    fresh: bool = False  # it was never opened here


class Restoring:
    """What the driver knows about stages that have lost what they had computed."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.checkpoints = Checkpoints(driver.settings.checkpoints)
        self._empty: set[int] = set()  # stages, until the sessions are opened again
        self._held: dict[int, Held] = {}  # sessions that wait for their turn
        self.suspects = Suspects()

    def blame(self, cause: str) -> None:
        """A fault, before anything is done about it: sessions that have met too many without a token between end."""
        if not may_be_a_session(cause):
            return
        for number in self.suspects.lost():
            session = self._driver.open_sessions.get(number)
            if session is not None:
                what = f"a stage was lost {MOST_LOSSES} times while it computed this session's next token, the last time {cause}"
                hint = "ask for something else: a simpler grammar, a shorter prompt"
                session.fail(SessionLost(what, where=f"session {number}", hint=hint))
                self._driver.end(session, cancelled=False)

    def begin(self, lost: Collection[int]) -> None:
        """A fault: these stages will come back without anything; what was under way does not count."""
        self.checkpoints.interrupted()
        self._empty |= set(lost)

    def reopen_all(self, what: str, grade: str, predicted_stall_s: float, *, replay: bool) -> None:
        """Every stage stands again. `replay`: no stage knows the sessions."""
        empty, self._empty = frozenset(self._empty), set()
        self.suspects.paused()
        for session in list(self._driver.open_sessions.values()):
            session.epoch += 1
            session.restored_tokens = 0
            session.resumed(what, grade, predicted_stall_s)
            held = self._held.get(session.number, Held())
            exact = held.exact and grade != "fast" and not replay
            self._held[session.number] = Held(empty=held.empty | empty, exact=exact, fresh=held.fresh)
        self._open_held()

    def open(self, session: Session) -> None:
        """For the first time here. One that an earlier driver began may have checkpoints on the disk."""
        self._held[session.number] = Held(fresh=True)
        self._open_held()

    def over(self, session: Session) -> None:
        """The session has ended; others may have waited for that."""
        self._held.pop(session.number, None)
        self.suspects.over(session.number)
        self._open_held()

    def _open_held(self) -> None:
        """Those whose turn it is."""
        if self._driver.recovering or not self._driver.connected:
            return
        for number in self.suspects.admit(self._held):
            held, session = self._held.pop(number), self._driver.open_sessions.get(number)
            if session is None:
                continue
            self.suspects.opened(number)
            stages = range(self._driver.num_stages) if held.fresh else held.empty
            if not ((self.checkpoints.on_disk if held.fresh else held.exact) and self._restore(session, stages)):
                self._driver.send_open(session, resume=held.exact and not held.fresh)

    def _restore(self, session: Session, stages: Collection[int]) -> bool:
        """Whether rebuilt stages get checkpoints first."""
        digest, send = self._driver.settings.hello.manifest_digest, self._driver.peers.send
        session.restored_tokens = self.checkpoints.restore(session, stages, digest, send)
        return session.restored_tokens > 0

    def after_token(self, session: Session) -> None:
        """Let others go on that waited for it; ask for a checkpoint, if it is time."""
        if self.suspects.token(session.number):
            self._open_held()
        if not self._driver.recovering:
            self.checkpoints.after_token(session, range(self._driver.num_stages), self._driver.peers.send)

    def on_kv(self, message: KvState, payload: memoryview | None) -> None:
        """A stage's state for a checkpoint, or, without a payload, its word that it has taken one back."""
        session = self._driver.open_sessions.get(message.session)
        if session is None or session.epoch != message.epoch:
            return
        if payload is not None:
            self.checkpoints.take(session, message, payload, self._driver.settings.hello.manifest_digest)
        elif self.checkpoints.answered(message.session, message.stage):
            session.restored()
            self._driver.send_open(session, resume=True)

    def on_failure(self, session: Session, failure: Failure, error: ShardwiseError) -> None:
        """Of one session at one stage: rows are computed again where that helps, otherwise it ends."""
        if failure.where == KV_STATE:  # a state could not be handed out, or not taken
            self.checkpoints.note(f"stage {failure.stage}: {failure.message}")
            if self.checkpoints.answered(session.number, failure.stage):
                self._driver.send_open(session, resume=True)
        elif failure.where == REFILL_IMPOSSIBLE:  # what a neighbour kept is not enough: replay through all stages
            session.epoch, session.restored_tokens = session.epoch + 1, 0
            self._driver.send_open(session, resume=False)
        else:
            session.fail(error)
            self._driver.end(session, cancelled=False)
