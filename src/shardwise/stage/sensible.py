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

MAX_ID = 2**63 - 1  # of sessions, epochs
MAX_INT = 2**31 - 1  # what llama.cpp counts with


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
            _within("position", message.position, 0, limits.context_tokens)
            _within("token", message.token, 0, limits.vocab_size - 1)
        case Wanted():
            _identity(message.session, message.epoch)
            _within("position", message.position, 0, limits.context_tokens)
        case KvState():
            _identity(message.session, message.epoch)
            _within("num_tokens", message.num_tokens, 0, limits.context_tokens)
        case CloseSession() | ExportKv():
            _identity(message.session, message.epoch)


def _opening(message: OpenSession, limits: StageLimits) -> None:
    _identity(message.session, message.epoch)
    num_tokens = len(message.tokens)
    _within("the number of tokens", num_tokens, 1, limits.context_tokens)
    _within("num_prompt", message.num_prompt, 1, num_tokens)
    _within("start_position", message.start_position, 0, num_tokens)
    _within("max_tokens", message.max_tokens, 0, MAX_INT)
    _within("tokens", min(message.tokens), 0, limits.vocab_size - 1)
    _within("tokens", max(message.tokens), 0, limits.vocab_size - 1)
    for stop in message.stop_ids:
        _within("stop_ids", stop, 0, MAX_INT)
    _sampling(message.sampling, limits)


def _sampling(settings: SamplingSettings, limits: StageLimits) -> None:
    for name in ("temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty"):
        _finite(name, getattr(settings, name))
    _finite("repetition_penalty", settings.repetition_penalty)
    if settings.temperature < 0 or settings.repetition_penalty <= 0:
        raise UsageError("a negative temperature or a repetition penalty that is not positive", where="sampling")
    _within("top_k", settings.top_k, 0, MAX_INT)
    _within("penalty_last_tokens", settings.penalty_last_tokens, -1, MAX_INT)
    _within("seed", settings.seed, 0, 2**64 - 1)
    _within("num_logprobs", settings.num_logprobs, -1, limits.vocab_size)
    _within("the length of the grammar", len(settings.grammar.encode()), 0, MAX_GRAMMAR_BYTES)
    for token, bias in settings.logit_bias:
        _within("logit_bias", token, 0, limits.vocab_size - 1)
        if math.isnan(bias):
            raise UsageError("logit_bias is not a number", where="sampling")


def _step(message: Step, limits: StageLimits) -> None:
    _within("the number of segments", len(message.segments), 1, limits.max_rows)
    if len({segment.session for segment in message.segments}) != len(message.segments):
        raise UsageError("a session has two segments in one step", where="segments")
    for segment in message.segments:
        _segment(segment, limits)
    _within("the number of rows", sum(segment.num_tokens for segment in message.segments), 1, limits.max_rows)
    _finite("sent_s", message.sent_s)


def _segment(segment: Segment, limits: StageLimits) -> None:
    _identity(segment.session, segment.epoch)
    _within("num_tokens", segment.num_tokens, 1, limits.max_rows)
    _within("position", segment.position, 0, limits.context_tokens - segment.num_tokens)


def _identity(session: int, epoch: int) -> None:
    _within("session", session, 1, MAX_ID)  # 0 would speak of the whole stage
    _within("epoch", epoch, 0, MAX_ID)


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UsageError(f"{name} = {value} in a message", where=name, hint=f"{low} to {high}")


def _finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise UsageError(f"{name} = {value} in a message", where=name, hint="a finite number")
