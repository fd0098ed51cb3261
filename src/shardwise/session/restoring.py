"""Opening sessions again after a fault, with checkpoints where there are some.

    all stages stand -> for each session: checkpoints of the rebuilt stages -> they say that they hold them -> OpenSession(resume)
                                          none, or one that a stage cannot take -> OpenSession(resume) at once: rows are refilled

**Promises** a session is opened once for every fault. **Fails when** never: what cannot be restored is computed again.
**Called by** the session driver, in its thread.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from shardwise.session.checkpoints import Checkpoints
from shardwise.session.session import Session
from shardwise.transport.messages import Failure, KvState

if TYPE_CHECKING:
    from shardwise.session.driver import Driver


class Restoring:
    """What the driver knows about stages that have lost what they had computed."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.checkpoints = Checkpoints(driver.settings.checkpoints)
        self._empty: set[int] = set()  # stages, until the sessions are opened again

    def begin(self, lost: Collection[int]) -> None:
        """A fault: these stages will come back without anything; what was under way does not count."""
        self.checkpoints.interrupted()
        self._empty |= set(lost)

    def reopen_all(self, what: str, grade: str, predicted_stall_s: float, *, replay: bool) -> None:
        """Every stage stands again. `replay`: no stage knows the sessions."""
        empty, self._empty = self._empty, set()
        for session in list(self._driver.open_sessions.values()):
            session.epoch += 1
            session.restored_tokens = 0
            session.resumed(what, grade, predicted_stall_s)
            exact = grade != "fast" and not replay
            if not (exact and self._restore(session, empty)):
                self._driver.send_open(session, resume=exact)

    def open(self, session: Session) -> None:
        """For the first time here. One that an earlier driver began may have checkpoints on the disk."""
        if not (self.checkpoints.on_disk and self._restore(session, range(self._driver.num_stages))):
            self._driver.send_open(session, resume=False)

    def _restore(self, session: Session, stages: Collection[int]) -> bool:
        """Whether rebuilt stages get checkpoints first."""
        digest, send = self._driver.settings.hello.manifest_digest, self._driver.peers.send
        session.restored_tokens = self.checkpoints.restore(session, stages, digest, send)
        return session.restored_tokens > 0

    def after_token(self, session: Session) -> None:
        """Ask for a checkpoint, if it is time."""
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

    def on_failure(self, session: Session, failure: Failure) -> None:
        """A stage could not hand out a state, or not take one: its rows are computed again."""
        self.checkpoints.note(f"stage {failure.stage}: {failure.message}")
        if self.checkpoints.answered(session.number, failure.stage):
            self._driver.send_open(session, resume=True)
