"""KV state of a session leaving and entering a stage: checkpoints, migration, prefill apart from decode.

The payload is llama.cpp's own state format with its SHA-256 beside it; a state whose digest differs is refused before
llama.cpp sees it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from shardwise.errors import CorruptWeightsError, SessionLost, ShardwiseError
from shardwise.stage.sessions import StageSession
from shardwise.transport.messages import ExportKv, KvState, failure_of

if TYPE_CHECKING:
    from shardwise.stage.worker import StageWorker


def answer_export(worker: StageWorker, message: ExportKv) -> None:
    """Send the session's KV state to the driver, or a failure."""
    session = worker.sessions.get(message.session)
    if session is None or session.opened.epoch != message.epoch:
        _fail(worker, message.session, message.epoch, SessionLost("no such session here", where=f"session {message.session}"))
        return
    state = worker.backend.export_kv(session.slot)
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
    """Put a KV state into a session that was opened with `start_position`; tells the driver by echoing without payload."""
    session = worker.sessions.get(message.session)
    try:
        if session is None or session.opened.epoch != message.epoch:
            raise SessionLost("no such session here", where=f"session {message.session}")
        num_tokens = _restore(worker, session, message, payload)
    except ShardwiseError as error:
        _fail(worker, message.session, message.epoch, error)
        return
    worker.links.to_driver(
        KvState(
            session=message.session,
            epoch=message.epoch,
            stage=worker.config.stage,
            request=message.request,
            num_tokens=num_tokens,
            digest=message.digest,
        )
    )


def _restore(worker: StageWorker, session: StageSession, message: KvState, payload: memoryview | None) -> int:
    state = bytes(payload or b"")
    actual = hashlib.sha256(state).hexdigest()
    if actual != message.digest:
        raise CorruptWeightsError("the KV state was damaged on the way", expected=message.digest, actual=actual)
    num_tokens = worker.backend.import_kv(session.slot, state)
    if num_tokens != message.num_tokens:
        raise CorruptWeightsError("the KV state has another length", expected=message.num_tokens, actual=num_tokens)
    session.next_position = num_tokens
    worker.queued[message.session] = num_tokens
    return num_tokens


def _fail(worker: StageWorker, session: int, epoch: int, error: ShardwiseError) -> None:
    worker.links.to_driver(failure_of(error, stage=worker.config.stage, session=session, epoch=epoch))
