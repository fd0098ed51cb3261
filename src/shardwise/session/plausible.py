"""Whether a well-formed message of a worker makes sense to the driver, asked before anything is done with it. Pure.

The codec has checked types; this checks values, and that nobody speaks for another stage: a worker is known by the connection
that its message came on. **Promises** what passes names a stage of this deployment, the sender's own, a token of the vocabulary,
a position of the context, finite times, an address that can be connected to. **Fails with** `UsageError` that names the field.
**Called by** `Peers`, for every message that the driver receives.
"""

from __future__ import annotations

import re

from shardwise.errors import UsageError
from shardwise.records import Record
from shardwise.transport.channel import Envelope
from shardwise.transport.handshake import REPLICA_STAGE
from shardwise.transport.messages import (
    AnyMessage,
    Beat,
    Closed,
    Connected,
    Failure,
    KvState,
    Pong,
    Preparing,
    Progress,
    Quantiles,
    Ready,
    Sampled,
    Stats,
)
from shardwise.transport.security.keys import check_public_key
from shardwise.transport.values import MAX_ID, MAX_INT, require_finite, require_within

_ADDRESS = re.compile(r"tcp://[A-Za-z0-9._:%\[\]-]{1,255}:([0-9]{1,5})")
_FINISHED = ("", "stop", "length")
_TIMES = ("prefill", "decode", "wait", "queue", "transfer", "copy")
_COUNTS = ("sessions", "kv_tokens", "peak_memory_bytes", "memory_bytes", "decode_rows", "prefill_tokens", "received_bytes")


class DriverLimits(Record):
    """What a worker's message may speak of."""

    num_stages: int
    context_tokens: int
    encrypted: bool
    vocab_size: int = 0  # 0 = not known yet


def require_plausible(envelope: Envelope, limits: DriverLimits) -> None:
    """Raise `UsageError` for what no worker in its right mind says."""
    message, stage = envelope.message, envelope.stage % REPLICA_STAGE
    if not 0 <= envelope.stage < REPLICA_STAGE + limits.num_stages or stage >= limits.num_stages:
        raise UsageError(f"a message of stage {envelope.stage}", where="stage", hint=f"0 to {limits.num_stages - 1}")
    if isinstance(message, Sampled):
        _sampled(message, stage, limits)
        return
    said = getattr(message, "stage", None)
    if said != stage:
        raise UsageError(f"stage {stage} speaks for stage {said}", where="stage")
    _values(message, limits)


def _values(message: AnyMessage, limits: DriverLimits) -> None:
    match message:
        case Beat():
            require_finite("now_s", message.now_s)
        case Pong():
            require_within("sequence", message.sequence, 0, MAX_INT)
            require_finite("sent_s", message.sent_s)
            require_finite("now_s", message.now_s)
        case Failure():
            require_within("session", message.session, 0, MAX_ID)
            require_within("epoch", message.epoch, 0, MAX_ID)
        case Closed():
            require_within("session", message.session, 0, MAX_ID)
        case KvState():
            require_within("session", message.session, 0, MAX_ID)
            require_within("num_tokens", message.num_tokens, 0, limits.context_tokens)
        case Ready():
            _ready(message, limits)
        case Preparing():
            require_within("done_bytes", message.done_bytes, 0, MAX_ID)
            require_within("total_bytes", message.total_bytes, 0, MAX_ID)
            require_finite("bytes_per_s", message.bytes_per_s)
            require_finite("left_s", message.left_s or 0.0)
        case Stats():
            _stats(message)
        case Connected() | Progress():
            pass
        case _:
            raise UsageError(f"a {type(message).__name__} is nothing that a stage says to the driver", where="message")


def _sampled(message: Sampled, stage: int, limits: DriverLimits) -> None:
    if stage != limits.num_stages - 1:
        raise UsageError(f"stage {stage} has no tokens to give", where="stage")
    require_within("session", message.session, 0, MAX_ID)
    require_within("epoch", message.epoch, 0, MAX_ID)
    require_within("position", message.position, 0, limits.context_tokens)
    most = (limits.vocab_size or MAX_INT) - 1
    require_within("token", message.token, 0, most)
    require_finite("sent_s", message.sent_s)
    if message.finish not in _FINISHED:
        raise UsageError(f"a token that ends its session with {message.finish[:20]!r}", where="finish")
    for candidate in message.top:
        require_within("top", candidate.token, 0, most)
    for visit in message.visits:
        require_within("visits", visit.stage, 0, limits.num_stages - 1)
        require_finite("visits", visit.received_s + visit.started_s + visit.computed_s + visit.sent_s + visit.copy_s)


def _ready(message: Ready, limits: DriverLimits) -> None:
    port = _ADDRESS.fullmatch(message.address)
    if port is None or not 0 < int(port[1]) < 2**16:
        raise UsageError(f"no address: {message.address[:80]!r}", where="address")
    if limits.encrypted:
        check_public_key(message.public_key)
    require_finite("load_s", message.load_s)
    for name in ("pid", "weight_bytes", "kv_bytes", "workspace_bytes"):
        require_within(name, getattr(message, name), 0, MAX_ID)


def _stats(message: Stats) -> None:
    for name in _COUNTS:
        require_within(name, getattr(message, name), 0, MAX_ID)
    for name in _TIMES:
        times: Quantiles = getattr(message, name)
        require_within(name, times.n, 0, MAX_ID)
        require_finite(name, times.total + times.p50 + times.p95 + times.p99 + times.max)
    require_finite("now_s", message.now_s)
