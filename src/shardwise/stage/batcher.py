"""Which rows a stage computes next. Pure: no clock, no socket, no model.

Items wait in two queues: decode (the row of a newly sampled token) and prefill (chunks of a prompt, and the forced rows of a
replay). Decode goes first; so that a busy stage does not starve a waiting prompt, a chunk gets its turn after `DECODE_TURNS`
decode batches.

A batch holds at most `ceil(active sessions / stages)` decode rows: with two users on two stages each keeps one stage
busy, which is faster than both travelling together; and one where a stage has found that its rows are faster one by one
(`row_times`). With `deterministic` a batch holds one session's rows only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.stage.backend import Floats
from shardwise.stage.row_times import RowTimes
from shardwise.transport.messages import Segment, Visit

DECODE_TURNS = 4


@dataclass(slots=True)
class Item:
    """Rows of one session that wait at this stage."""

    segment: Segment
    x_TH: Floats | None  # None on stage 0: `tokens` are embedded when the batch runs
    tokens: tuple[int, ...]
    received_s: float
    visits: tuple[Visit, ...] = ()
    peer: bytes = b""  # who sent it, for the acknowledgement of a chunk


class Batcher:
    """The waiting room of one stage."""

    def __init__(self, *, num_stages: int, max_rows: int, deterministic: bool) -> None:
        self._num_stages, self._max_rows, self._deterministic = num_stages, max_rows, deterministic
        self._decode: deque[Item] = deque()
        self._prefill: deque[Item] = deque()
        self._in_prefill: Counter[int] = Counter()  # items by session
        self._turns = 0.0
        self.row_times = RowTimes()

    def add(self, item: Item) -> None:
        """Queue an item. One row is decode, unless earlier rows of its session still wait as prefill."""
        session = item.segment.session
        if item.segment.num_tokens > 1 or not item.segment.sample or self._in_prefill[session]:
            self._in_prefill[session] += 1
            self._prefill.append(item)
        else:
            self._decode.append(item)

    def __len__(self) -> int:
        return len(self._decode) + len(self._prefill)

    def discard(self, keep: Callable[[Segment], bool]) -> list[Item]:
        """Forget items whose segment is not to be kept; returns them, so that their senders hear of it."""
        dropped = [i for i in (*self._decode, *self._prefill) if not keep(i.segment)]
        self._decode = deque(i for i in self._decode if keep(i.segment))
        self._prefill = deque(i for i in self._prefill if keep(i.segment))
        self._in_prefill = Counter(i.segment.session for i in self._prefill)
        return dropped

    def next_batch(self, *, active_sessions: int, prefill_allowed: bool) -> list[Item]:
        """The items of the next step, or none. `prefill_allowed`: the next stage has room for another chunk."""
        prefill_ready = bool(self._prefill) and prefill_allowed
        if self._decode and not (prefill_ready and self._turns >= DECODE_TURNS):
            return self._take_decode(active_sessions)
        if prefill_ready:
            self._turns = 0.0
            item = self._prefill.popleft()
            self._in_prefill[item.segment.session] -= 1
            return [item]
        return []

    def _take_decode(self, active_sessions: int) -> list[Item]:
        if self._deterministic or len(self._decode) == 1:
            self._turns += 1
            return [self._decode.popleft()]
        waiting = len({item.segment.session for item in self._decode})
        together = min(waiting, self._max_rows, max(1, -(-active_sessions // self._num_stages)))
        limit = self.row_times.rows_of_next(together)
        self._turns += limit / together  # rows that go one by one have one turn between them
        taken: list[Item] = []
        passed: list[Item] = []
        seen: set[int] = set()
        while self._decode and len(taken) < limit:
            item = self._decode.popleft()
            (passed if item.segment.session in seen else taken).append(item)
            seen.add(item.segment.session)
        self._decode.extendleft(reversed(passed))  # a session's rows keep their order
        return taken
