"""Whether a well-formed message makes sense for this stage, asked before anything is done with it. Pure.

The codec has checked types; this checks values: ranges of positions, tokens inside the vocabulary, finite sampling settings.
**Promises** what passes cannot make the worker index outside an array or llama.cpp outside its cache. **Fails with** `UsageError`
that names the field. **Called by** the worker's loop for every message from a peer.
"""

from __future__ import annotations

import math

from shardwise.errors import UsageError
from shardwise.records import Record
from shardwise.transport.messages import (
    MAX_GRAMMAR_BYTES,
    AnyMessage,
    CloseSession,
    ExportKv,
    KvState,
    OpenSession,
    Sampled,
    SamplingSettings,
    Segment,
    Step,
    Wanted,
)
from shardwise.transport.values import MAX_ID, MAX_INT, require_finite, require_within


class StageLimits(Record):
    """What this stage can hold."""

    context_tokens: int  # of a session
    max_rows: int  # of a step
    vocab_size: int = MAX_INT  # where this stage knows it


def require_sensible(message: AnyMessage, limits: StageLimits) -> None:
    """Raise `UsageError` for values that no peer in its right mind sends."""
    match message:
        case OpenSession():
            _opening(message, limits)
        case Step():
            _step(message, limits)
        case Sampled():
            _identity(message.session, message.epoch)
            require_within("position", message.position, 0, limits.context_tokens)
            require_within("token", message.token, 0, limits.vocab_size - 1)
        case Wanted():
            _identity(message.session, message.epoch)
            require_within("position", message.position, 0, limits.context_tokens)
        case KvState():
            _identity(message.session, message.epoch)
            require_within("num_tokens", message.num_tokens, 0, limits.context_tokens)
        case CloseSession() | ExportKv():
            _identity(message.session, message.epoch)


def _opening(message: OpenSession, limits: StageLimits) -> None:
    _identity(message.session, message.epoch)
    num_tokens = len(message.tokens)
    require_within("the number of tokens", num_tokens, 1, limits.context_tokens)
    require_within("num_prompt", message.num_prompt, 1, num_tokens)
    require_within("start_position", message.start_position, 0, num_tokens)
    require_within("max_tokens", message.max_tokens, 0, MAX_INT)
    require_within("tokens", min(message.tokens), 0, limits.vocab_size - 1)
    require_within("tokens", max(message.tokens), 0, limits.vocab_size - 1)
    for stop in message.stop_ids:
        require_within("stop_ids", stop, 0, MAX_INT)
    _sampling(message.sampling, limits)


def _sampling(settings: SamplingSettings, limits: StageLimits) -> None:
    for name in ("temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty"):
        require_finite(name, getattr(settings, name))
    require_finite("repetition_penalty", settings.repetition_penalty)
    if settings.temperature < 0 or settings.repetition_penalty <= 0:
        raise UsageError("a negative temperature or a repetition penalty that is not positive", where="sampling")
    require_within("top_k", settings.top_k, 0, MAX_INT)
    require_within("penalty_last_tokens", settings.penalty_last_tokens, -1, MAX_INT)
    require_within("seed", settings.seed, 0, 2**64 - 1)
    require_within("num_logprobs", settings.num_logprobs, -1, limits.vocab_size)
    require_within("the length of the grammar", len(settings.grammar.encode()), 0, MAX_GRAMMAR_BYTES)
    for token, bias in settings.logit_bias:
        require_within("logit_bias", token, 0, limits.vocab_size - 1)
        if math.isnan(bias):
            raise UsageError("logit_bias is not a number", where="sampling")


def _step(message: Step, limits: StageLimits) -> None:
    require_within("the number of segments", len(message.segments), 1, limits.max_rows)
    if len({segment.session for segment in message.segments}) != len(message.segments):
        raise UsageError("a session has two segments in one step", where="segments")
    for segment in message.segments:
        _segment(segment, limits)
    require_within("the number of rows", sum(segment.num_tokens for segment in message.segments), 1, limits.max_rows)
    require_finite("sent_s", message.sent_s)


def _segment(segment: Segment, limits: StageLimits) -> None:
    _identity(segment.session, segment.epoch)
    require_within("num_tokens", segment.num_tokens, 1, limits.max_rows)
    require_within("position", segment.position, 0, limits.context_tokens - segment.num_tokens)


def _identity(session: int, epoch: int) -> None:
    require_within("session", session, 1, MAX_ID)  # 0 would speak of the whole stage
    require_within("epoch", epoch, 0, MAX_ID)
