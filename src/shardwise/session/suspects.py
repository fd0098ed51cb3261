"""Which session may be the reason that stages are lost again and again. Pure.

    a stage is lost or stuck -> every session that was under way has one loss more; a new token takes them away
    two losses without a token between -> a suspect: suspects are opened again one at a time, before all others
    three -> the verdict: the session ends with an error, the others go on

So a request that kills or stalls whatever computes it costs three incidents, and never an innocent neighbour: whoever waits in
the same step gives a token as soon as it runs without the guilty one. **Called by** `restoring`.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.session.recovery import Cause

SUSPECT_LOSSES, MOST_LOSSES = 2, 3
_BLAMED = (Cause.CRASHED, Cause.SILENT, Cause.STUCK)  # a session's step can do that; not a stopped process or a wrong file


def may_be_a_session(cause: str) -> bool:
    """Whether a recovery's cause ("stuck: no progress for 6.1 s") can be what a session asked for."""
    return cause.partition(":")[0] in _BLAMED


class Suspects:
    """Losses by session."""

    def __init__(self) -> None:
        self._losses: dict[int, int] = {}  # without a token since
        self._under_way: set[int] = set()  # opened on the stages since the last loss

    def opened(self, session: int) -> None:
        """The stages compute it from now on."""
        self._under_way.add(session)

    def is_under_way(self, session: int) -> bool:
        """Whether the stages have it since the last loss."""
        return session in self._under_way

    def paused(self) -> None:
        """Nothing is computed until sessions are opened again, and no session is to blame."""
        self._under_way.clear()

    def lost(self) -> list[int]:
        """A stage was lost or stuck; returns the sessions that are to end. Further losses before a session is opened again
        belong to the same incident."""
        for session in self._under_way:
            self._losses[session] = self._losses.get(session, 0) + 1
        self.paused()
        return [session for session, losses in self._losses.items() if losses >= MOST_LOSSES]

    def token(self, session: int) -> bool:
        """It got on; whether it was a suspect, so that others may have waited."""
        return self._losses.pop(session, 0) >= SUSPECT_LOSSES

    def over(self, session: int) -> None:
        """It has ended."""
        self._losses.pop(session, None)
        self._under_way.discard(session)

    def admit(self, held: Iterable[int]) -> list[int]:
        """Which of these may be opened now: all, or one suspect alone, or none while a suspect is under way."""
        suspects = {session for session, losses in self._losses.items() if losses >= SUSPECT_LOSSES}
        if suspects & self._under_way:
            return []
        waiting = sorted(held)
        return [session for session in waiting if session in suspects][:1] or waiting
