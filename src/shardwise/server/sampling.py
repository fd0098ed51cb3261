"""Request fields -> `SamplingSettings`, with OpenAI's defaults (temperature 1, top_p 1)."""

from __future__ import annotations

import secrets
from typing import Protocol

from shardwise.server.problems import invalid
from shardwise.transport.messages import SamplingSettings

_SEED_MASK = 2**63 - 1


class SamplingFields(Protocol):
    """What chat, completion and response requests have in common."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    logit_bias: dict[str, float] | None


def sampling_settings(fields: SamplingFields, *, vocab_size: int, grammar: str = "", num_logprobs: int = -1) -> SamplingSettings:
    """How the next token is chosen; without a seed a random one is drawn, so that repeated requests differ."""
    return SamplingSettings(
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_k=fields.top_k or 0,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        min_p=fields.min_p or 0.0,
        typical_p=1.0 if fields.typical_p is None else fields.typical_p,
        repetition_penalty=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        penalty_last_tokens=-1,
        seed=(secrets.randbits(62) if fields.seed is None else fields.seed) & _SEED_MASK,
        logit_bias=_bias(fields.logit_bias or {}, vocab_size),
        grammar=grammar,
        num_logprobs=num_logprobs,
    )


def _bias(given: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    out = []
    for name, value in given.items():
        if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocab_size):
            raise invalid(f"logit_bias: {name!r:.40} is not a token id below {vocab_size}", "logit_bias")
        if not -100.0 <= value <= 100.0:
            raise invalid(f"logit_bias: {value} is not between -100 and 100", "logit_bias")
        out.append((int(name), float(value)))
    return tuple(sorted(out))
