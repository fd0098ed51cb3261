"""Resuming a session after a fault, so that only what was lost is computed again.

    driver -- OpenSession(resume) --> stage 0 --> stage 1 --> ... --> last stage
              each stage keeps its KV as far as the driver's tokens reach, a rebuilt stage starts empty
    last stage -- Wanted(n) --> previous: sends its kept rows from n on again, then asks its own predecessor -- Wanted(m) --> ...
              stage 0 embeds the tokens that are still missing

Nothing new is sent before the successor has said what it lacks, so there is never a gap, and every row keeps the shape it
had the first time. L is the number of known tokens: all stages end at position L, and the last one computes position L - 1
again if it has to, because the token it drew there did not reach the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.errors import RemoteFailure, SessionLost
from shardwise.records import replace
from shardwise.stage.sent_log import SentRows
from shardwise.stage.sessions import StageSession
from shardwise.transport.messages import REFILL_IMPOSSIBLE, OpenSession, Step, Wanted

if TYPE_CHECKING:
    from shardwise.stage.worker import StageWorker


def resume_position(opened: OpenSession, next_position: int, chunk_tokens: int, *, is_last: bool) -> int:
    """Up to where a stage's KV stays valid and useful.

    The last stage must produce logits for position L - 1; where that lies in the prompt, its whole chunk is computed again,
    in its own shape.
    """
    known = len(opened.tokens)
    if not is_last or next_position < known:
        return min(next_position, known)
    target = known - 1
    return target - target % chunk_tokens if target < opened.num_prompt else target


def adopt(worker: StageWorker, session: StageSession, message: OpenSession) -> None:
    """A surviving stage takes the new epoch and keeps its KV as far as it holds."""
    position = resume_position(message, session.next_position, worker.config.settings.chunk_tokens, is_last=worker.is_last)
    worker.release(worker.batcher.discard(lambda segment: segment.session != message.session))
    if position < session.next_position:
        try:
            worker.backend.rollback(session.slot, position)
        except RemoteFailure:  # a recurrent state cannot go back: begin again; the slot is empty now
            position = 0
    session.opened = message
    session.next_position = position
    worker.queued[message.session] = position
    worker.sent_log.truncate(message.session, position)


def continue_from(worker: StageWorker, session: StageSession) -> None:
    """What a stage does once its successor has all it needs: feed the missing tokens, or ask the predecessor."""
    opened = session.opened
    if worker.is_first:
        worker.enqueue_tokens(replace(opened, start_position=session.next_position))
    else:
        wanted = Wanted(session=opened.session, epoch=opened.epoch, position=session.next_position)
        worker.links.inbox.reply(session.upstream, wanted)


def on_wanted(worker: StageWorker, message: Wanted) -> None:
    """The successor lacks rows from a position on: send them again, in their old shapes, with the new epoch."""
    session = _session(worker, message)
    if session is None:
        return
    rows = worker.sent_log.rows_from(message.session, message.position, session.next_position)
    if rows is None and message.position < session.next_position:
        raise SessionLost(f"rows from {message.position} to {session.next_position} are not kept here", where=REFILL_IMPOSSIBLE)
    for kept in rows or ():
        prefill = kept.segment.num_tokens > 1
        worker.links.to_next(_step(worker, kept, message.epoch), kept.payload, prefill=prefill)
    continue_from(worker, session)


def refill_mirror(worker: StageWorker, message: Wanted) -> None:
    """The successor's replica lacks rows; where they are not kept it stays behind until it is needed."""
    session = _session(worker, message)
    if session is None:
        return
    for kept in worker.sent_log.rows_from(message.session, message.position, session.next_position) or ():
        worker.links.to_next_mirror(_step(worker, kept, message.epoch), kept.payload)


def _session(worker: StageWorker, message: Wanted) -> StageSession | None:
    session = worker.sessions.get(message.session)
    if session is None or session.opened.epoch != message.epoch:
        worker.figures.num_fenced += 1
        return None
    return session


def _step(worker: StageWorker, kept: SentRows, epoch: int) -> Step:
    return Step(
        segments=(replace(kept.segment, epoch=epoch),),
        dtype=worker.config.wire_dtype,
        hidden=worker.backend.hidden_size,
        sent_s=worker.clock.now_s(),
    )
