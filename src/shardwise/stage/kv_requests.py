"""KV state of a session leaving and entering a stage: checkpoints, migration, prefill apart from decode.

    ExportKv -> the state of that moment -> KvState + payload to the driver
    KvState + payload -> verified, kept aside -> a word to the driver -> OpenSession(resume, start_position) puts it into a slot

The payload is llama.cpp's own state format with its SHA-256 beside it; a state whose digest differs is refused before
llama.cpp sees it. **Fails with** a `Failure` whose `where` is `KV_STATE`: a checkpoint less, never a session.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from shardwise.errors import CorruptWeightsError, QueueFull, RemoteFailure, SessionLost, ShardwiseError
from shardwise.records import replace
from shardwise.stage.sessions import StageSession
from shardwise.transport.messages import KV_STATE, ExportKv, KvState, failure_of

if TYPE_CHECKING:
    from shardwise.stage.worker import StageWorker


class Aside:
    """States that have come for sessions which are not open yet."""

    def __init__(self, max_sessions: int) -> None:
        self._max = max_sessions
        self._kept: dict[int, tuple[KvState, memoryview]] = {}

    def keep(self, message: KvState, payload: memoryview) -> None:
        """Raises `QueueFull` beyond one a session."""
        if message.session not in self._kept and len(self._kept) >= self._max:
            raise QueueFull(f"{len(self._kept)} states wait already", where=KV_STATE)
        self._kept[message.session] = (message, payload)

    def take(self, session: int, epoch: int) -> tuple[KvState, memoryview] | None:
        """The session's state, if it is of that epoch; it is not kept any longer."""
        found = self._kept.pop(session, None)
        return found if found is not None and found[0].epoch == epoch else None

    def clear(self) -> None:
        """A new epoch of the deployment: whoever sent these sends them again."""
        self._kept.clear()


def answer_export(worker: StageWorker, message: ExportKv) -> None:
    """Send the session's KV state to the driver, or a failure."""
    session = worker.sessions.get(message.session)
    if session is None or session.opened.epoch != message.epoch:
        _fail(worker, message.session, message.epoch, SessionLost(f"no session {message.session} here"))
        return
    try:
        state = worker.backend.export_kv(session.slot)
    except ShardwiseError as error:
        _fail(worker, message.session, message.epoch, error)
        return
    worker.links.to_driver(
        KvState(
            session=message.session,
            epoch=message.epoch,
            stage=worker.config.stage,
            request=message.request,
            num_tokens=session.next_position,
            digest=hashlib.sha256(state).hexdigest(),
        ),
        state,
    )


def import_state(worker: StageWorker, message: KvState, payload: memoryview | None) -> None:
    """Keep a verified state until its session is opened; tells the driver by echoing without payload."""
    try:
        state = payload if payload is not None else memoryview(b"")
        if (actual := hashlib.sha256(state).hexdigest()) != message.digest:
            raise CorruptWeightsError("the KV state was damaged on the way", expected=message.digest, actual=actual)
        worker.aside.keep(message, state)
    except ShardwiseError as error:
        _fail(worker, message.session, message.epoch, error)
        return
    worker.links.to_driver(
        KvState(
            session=message.session,
            epoch=message.epoch,
            stage=worker.config.stage,
            request=message.request,
            num_tokens=message.num_tokens,
            digest=message.digest,
        )
    )


def put_back(worker: StageWorker, session: StageSession) -> None:
    """A session is opened again on a stage that was rebuilt: its state up to `start_position`, if one was kept aside.

    Where llama.cpp does not take it, or the architecture cannot go back to that position, the session begins anew: its rows come
    from the neighbour.
    """
    opened = session.opened
    found = worker.aside.take(opened.session, opened.epoch)
    if found is None or not opened.resume:
        return
    message, state = found
    try:
        num_tokens = worker.backend.import_kv(session.slot, bytes(state))
        if not opened.start_position <= num_tokens == message.num_tokens:
            raise RemoteFailure(f"the state holds {num_tokens} positions, expected {message.num_tokens}", where=KV_STATE)
        worker.backend.rollback(session.slot, opened.start_position)
    except ShardwiseError:
        worker.backend.rollback(session.slot, 0)
        return
    session.next_position = opened.start_position
    worker.sent_log.begin(opened.session)


def _fail(worker: StageWorker, session: int, epoch: int, error: ShardwiseError) -> None:
    failure = failure_of(error, stage=worker.config.stage, session=session, epoch=epoch)
    worker.links.to_driver(replace(failure, where=KV_STATE))
