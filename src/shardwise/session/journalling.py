"""What the driver writes into its journal, and what follows where that cannot be written: a full or failing disk.

A session that is in the journal is promised to survive this driver. One whose event cannot be written ends with an error that
names the file, before anybody has seen the token; others, and those that are not journalled, go on. What the journal still has
to hear (that the session is over) is written as soon as the disk takes it; until then the deployment says that it is not ready.
**Called by** the session driver, in its thread.
"""

from __future__ import annotations

from collections import deque

from shardwise.errors import SessionLost
from shardwise.session.journal import AnyEvent, Ended, Generated, Journal, Opened
from shardwise.session.session import Session
from shardwise.transport.messages import Sampled


class Journalling:
    """A driver's journal, or none."""

    def __init__(self, journal: Journal | None) -> None:
        self.journal = journal
        self.failure: SessionLost | None = None  # why nothing can be written at present
        self._owed: deque[Ended] = deque()

    def begin(self, session: Session, manifest_digest: str) -> bool:
        """The session with all its tokens, under the manifest that serves it now; whether it goes on: else it has failed."""
        if self.journal is not None and session.journalled:
            try:
                self._opened(session, manifest_digest)
            except SessionLost as error:
                session.fail(error)
        return not session.finished

    def _opened(self, session: Session, manifest_digest: str) -> None:
        opened = Opened(session=session.number, request=session.request, manifest_digest=manifest_digest)
        try:
            self._write(opened)
        except SessionLost:
            session.journalled = False  # there is nothing to end
            raise
        for index, token in enumerate(session.generated):
            self._write(Generated(session=session.number, position=len(session.request.prompt) + index, token=token))

    def token(self, session: Session, sampled: Sampled) -> None:
        """Before anybody sees it; `SessionLost` where it cannot be written."""
        if self.journal is not None and session.journalled and session.is_due(sampled):
            self._write(Generated(session=session.number, position=sampled.position, token=sampled.token))

    def ended(self, session: Session, reason: str) -> None:
        """The session is over."""
        if session.journalled:
            session.journalled = False
            self.over(session.number, reason)

    def over(self, number: int, reason: str) -> None:
        """A session, perhaps of an earlier driver, is over; written later where that cannot be now."""
        if self.journal is not None:
            self._owed.append(Ended(session=number, reason=reason))
            self.try_again()

    def try_again(self) -> None:
        """Write what is owed, if the disk takes it; where nothing could be written and nothing is owed, find out."""
        if self.failure is not None and not self._owed:
            self._owed.append(Ended(session=0, reason="the journal could not be written"))
        while self._owed and self._append(self._owed[0]):
            self._owed.popleft()

    def close(self) -> None:
        """Harmless when repeated."""
        if self.journal is not None:
            self.journal.close()

    def _write(self, event: AnyEvent) -> None:
        self.try_again()
        if self._owed or not self._append(event):
            assert self.failure is not None
            raise self.failure

    def _append(self, event: AnyEvent) -> bool:
        assert self.journal is not None
        try:
            self.journal.append(event)
        except (OSError, ValueError) as error:  # ValueError: the file is closed, it could not be opened again
            reason = getattr(error, "strerror", None) or str(error)
            self.failure = SessionLost(
                f"the journal cannot be written: {reason}",
                where=str(self.journal.path),
                hint="make room on that disk, or start without --journal",
            )
            return False
        self.failure = None
        return True
