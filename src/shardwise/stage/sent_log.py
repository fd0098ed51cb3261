"""The activations a stage has sent, kept for live sessions so that a rebuilt neighbour is refilled from here.

Rows are kept in the very segments in which they were sent: a stage that computes them again in these shapes gets the same
bits. Within a byte budget; when it is exceeded the largest session's log goes, and that session can then only be recovered
by replaying it through all stages.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shardwise.transport.messages import Segment


@dataclass(frozen=True, slots=True)
class SentRows:
    """One segment with its activations, as they were sent."""

    segment: Segment
    payload: memoryview


class SentLog:
    """Sent rows by session."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._rows: dict[int, deque[SentRows]] = {}
        self._bytes: dict[int, int] = {}
        self.num_bytes = 0
        self.num_evicted = 0

    def append(self, segment: Segment, payload: memoryview) -> None:
        """Keep rows that were just sent. A session whose earlier rows are missing is not kept."""
        rows = self._rows.get(segment.session)
        if rows is None:
            if segment.position > 0:
                return
            rows = self._rows[segment.session] = deque()
        rows.append(SentRows(segment, payload))
        self._bytes[segment.session] = self._bytes.get(segment.session, 0) + len(payload)
        self.num_bytes += len(payload)
        while self.num_bytes > self._budget_bytes and self._bytes:
            self.num_evicted += 1
            self.forget(max(self._bytes, key=lambda session: self._bytes[session]))

    def begin(self, session: int) -> None:
        """Keep a session's rows from wherever they begin: what was before is in a checkpoint."""
        self._rows.setdefault(session, deque())

    def rows_from(self, session: int, position: int, end: int) -> list[SentRows] | None:
        """The rows [position, end) in their segments; None where they are not all here or cut a segment."""
        found = [r for r in self._rows.get(session, ()) if position <= r.segment.position < end]
        at = position
        for rows in found:
            if rows.segment.position != at:
                return None
            at += rows.segment.num_tokens
        return found if at == end else None

    def truncate(self, session: int, position: int) -> None:
        """Forget rows from `position` on."""
        rows = self._rows.get(session)
        while rows and rows[-1].segment.position + rows[-1].segment.num_tokens > position:
            size = len(rows.pop().payload)
            self._bytes[session] -= size
            self.num_bytes -= size

    def forget(self, session: int) -> None:
        """The session is over (or too large)."""
        self._rows.pop(session, None)
        self.num_bytes -= self._bytes.pop(session, 0)
