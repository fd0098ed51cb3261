"""The sessions of one stage: which slot each has, and which position comes next.

Idempotence lives here: `check` says of every segment whether it is the next one, a duplicate, or belongs to an epoch or
session that is over. A gap is an error, never guessed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from shardwise.errors import QueueFull, SessionLost
from shardwise.stage.backend import TokenSampler
from shardwise.transport.messages import OpenSession, Segment

MAX_REMEMBERED = 4096  # closed sessions; numbers are never used again


@dataclass(slots=True)
class StageSession:
    """One session on one stage."""

    opened: OpenSession
    slot: int
    next_position: int
    history: list[int] = field(default_factory=list)  # last stage only: all tokens so far
    sampler: TokenSampler | None = None  # last stage only
    upstream: bytes = b""  # routing id of the predecessor, for `Wanted`

    @property
    def num_generated(self) -> int:
        return len(self.history) - self.opened.num_prompt


class SessionTable:
    """Sessions by number, slots by session."""

    def __init__(self, max_sessions: int) -> None:
        self._free = list(range(max_sessions - 1, -1, -1))
        self._sessions: dict[int, StageSession] = {}
        self._over: OrderedDict[int, None] = OrderedDict()  # the latest that were closed for good

    def __len__(self) -> int:
        return len(self._sessions)

    def values(self) -> list[StageSession]:
        return list(self._sessions.values())

    def get(self, session: int) -> StageSession | None:
        return self._sessions.get(session)

    def open(self, message: OpenSession) -> StageSession:
        """Give the session a slot; `QueueFull` where there is none."""
        if not self._free:
            raise QueueFull(f"all {len(self._sessions)} session slots are taken", where=f"session {message.session}")
        session = StageSession(opened=message, slot=self._free.pop(), next_position=0)
        self._sessions[message.session] = session
        return session

    def close(self, session: int) -> StageSession | None:
        """Forget a session; its slot is free again."""
        found = self._sessions.pop(session, None)
        if found is not None:
            self._free.append(found.slot)
            self._free.sort(reverse=True)  # low slots first: llama.cpp batches neighbouring sequences together
        return found

    def end(self, session: int) -> None:
        """The driver is done with a session. Its opening travels through the stages and may come later than this."""
        self._over[session] = None
        while len(self._over) > MAX_REMEMBERED:
            self._over.popitem(last=False)

    def is_over(self, session: int) -> bool:
        """Whether the driver has closed this session, also before it was opened here."""
        return session in self._over

    def belongs(self, segment: Segment) -> bool:
        """Whether the segment's session lives here in that epoch."""
        found = self._sessions.get(segment.session)
        return found is not None and found.opened.epoch == segment.epoch

    def check(self, segment: Segment, queued_position: int) -> bool:
        """True for the next rows, False for a duplicate; `SessionLost` for a gap."""
        if segment.position == queued_position:
            return True
        if segment.position < queued_position:
            return False
        raise SessionLost(f"position {segment.position} came where {queued_position} was due", where=f"session {segment.session}")
