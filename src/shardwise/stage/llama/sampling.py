"""Choosing the next token with llama.cpp's own samplers, without state.

The draw at position p depends on (session seed, p) and the token history only: for every token the chain is made anew
and its last member gets the seed `mix(seed, p)`. A stage that was rebuilt after a fault therefore draws the same token.
Only a grammar has state; it is rebuilt from the generated tokens.

Order of the chain: logit bias, grammar, penalties, top-k, typical, top-p, min-p, temperature, draw (as llama.cpp's CLI).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from shardwise.errors import UsageError
from shardwise.stage.backend import Choice, Floats
from shardwise.stage.llama import library
from shardwise.transport.messages import SamplingSettings, TokenLogprob

_MASK = (1 << 64) - 1
_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


def mix(seed: int, position: int) -> int:
    """A 32-bit seed for one position: splitmix64 of the session seed plus the position."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) & 0xFFFFFFFF


def log_softmax(logits_V: Floats) -> Floats:
    """Log probabilities [V] of the raw logits [V], in float64 inside."""
    wide = logits_V.astype(np.float64)
    wide -= wide.max()
    logprobs_V: Floats = (wide - np.log(np.exp(wide).sum())).astype(np.float32)
    return logprobs_V


def best_ids(values_V: Floats, k: int) -> list[int]:
    """The `k` largest entries of [V], largest first, lower ids first among equals."""
    if k <= 0:
        return []
    least = np.partition(values_V, -k)[-k]
    ids = np.flatnonzero(values_V >= least)
    return [int(i) for i in ids[np.argsort(-values_V[ids], kind="stable")][:k]]


class Sampler:
    """Chooses tokens for one session."""

    def __init__(
        self, settings: SamplingSettings, vocab: Callable[[], Any], vocab_size: int, generated: tuple[int, ...] = ()
    ) -> None:
        """`vocab` gives llama.cpp's vocabulary, and is asked only where there is a grammar."""
        self._api = library.load()
        self.settings, self._vocab, self._vocab_size = settings, vocab, vocab_size
        self._grammar = self._make_grammar(generated)
        self._plain_greedy = (
            settings.temperature <= 0
            and self._grammar is None
            and not settings.logit_bias
            and settings.repetition_penalty == 1.0
            and settings.presence_penalty == 0.0
            and settings.frequency_penalty == 0.0
        )

    def _make_grammar(self, generated: tuple[int, ...]) -> Any:
        if not self.settings.grammar:
            return None
        grammar = self._api.llama_sampler_init_grammar(self._vocab(), self.settings.grammar.encode(), b"root")
        if not grammar:
            raise UsageError(f"the grammar is not valid GBNF: {library.take_log()}", where="grammar")
        try:
            for token in generated:
                self._accept(grammar, token)
        except UsageError:
            self._api.llama_sampler_free(grammar)
            raise
        return grammar

    def _accept(self, grammar: Any, token: int) -> None:
        """Move a grammar on. A token that it does not allow is a `UsageError`; llama.cpp would end the process."""
        alone = np.zeros(1, dtype=_TOKEN_DATA)
        alone["id"] = token
        data = ctypes.cast(alone.ctypes.data, self._api.llama_token_data_p)
        candidates = self._api.llama_token_data_array(data=data, size=1, selected=-1, sorted=False)
        self._api.llama_sampler_apply(grammar, ctypes.byref(candidates))
        if not np.isfinite(alone["logit"][0]):
            hint = "loosen the grammar, or the logit bias"
            raise UsageError("the grammar allows none of the model's tokens here", where="grammar", hint=hint)
        self._api.llama_sampler_accept(grammar, token)

    def choose(self, logits_V: Floats, history: list[int], position: int) -> Choice:
        """The token at `position` from the logits [V] of the row before it; `history` is all tokens before it."""
        token = int(np.argmax(logits_V)) if self._plain_greedy else self._chain(logits_V, history, position)
        if self._grammar is not None:
            self._accept(self._grammar, token)
        if self.settings.num_logprobs < 0:
            return Choice(token, None, ())
        logprobs_V = log_softmax(logits_V)
        k = min(self.settings.num_logprobs, len(logprobs_V))
        best = best_ids(logprobs_V, k)
        return Choice(token, float(logprobs_V[token]), tuple(TokenLogprob(token=i, logprob=float(logprobs_V[i])) for i in best))

    def _chain(self, logits_V: Floats, history: list[int], position: int) -> int:
        api, settings = self._api, self.settings
        data = np.empty(self._vocab_size, dtype=_TOKEN_DATA)
        data["id"] = np.arange(self._vocab_size, dtype=np.int32)
        data["logit"] = logits_V
        data["p"] = 0.0
        candidates = api.llama_token_data_array(
            data=ctypes.cast(data.ctypes.data, api.llama_token_data_p), size=self._vocab_size, selected=-1, sorted=False
        )
        pointer = ctypes.byref(candidates)
        steps = self._steps(history)
        try:
            if settings.logit_bias:
                api.llama_sampler_apply(steps[0], pointer)
            if self._grammar is not None:
                api.llama_sampler_apply(self._grammar, pointer)
            for step in steps[1 if settings.logit_bias else 0 :]:
                api.llama_sampler_apply(step, pointer)
            last = (
                api.llama_sampler_init_greedy()
                if settings.temperature <= 0
                else api.llama_sampler_init_dist(mix(settings.seed, position))
            )
            steps.append(last)
            api.llama_sampler_apply(last, pointer)
        finally:
            for step in steps:
                api.llama_sampler_free(step)
        return int(candidates.data[candidates.selected].id)

    def _steps(self, history: list[int]) -> list[Any]:
        """The stateless members of the chain, logit bias first where there is one."""
        api, s, steps = self._api, self.settings, []
        if s.logit_bias:
            array = (api.llama_logit_bias * len(s.logit_bias))(*[api.llama_logit_bias(token=t, bias=b) for t, b in s.logit_bias])
            steps.append(api.llama_sampler_init_logit_bias(self._vocab_size, len(s.logit_bias), array))
        if s.repetition_penalty != 1.0 or s.presence_penalty or s.frequency_penalty:
            # llama.cpp allocates as many as it is told: 2^31 would be 8 GB a token.
            last = len(history) if s.penalty_last_tokens < 0 else min(s.penalty_last_tokens, len(history))
            penalties = api.llama_sampler_init_penalties(
                self._vocab_size, last, s.repetition_penalty, s.frequency_penalty, s.presence_penalty
            )
            for token in history[-last:] if last else []:
                api.llama_sampler_accept(penalties, token)
            steps.append(penalties)
        if s.temperature > 0:
            if s.top_k > 0:
                steps.append(api.llama_sampler_init_top_k(s.top_k))
            if s.typical_p < 1.0:
                steps.append(api.llama_sampler_init_typical(s.typical_p, 1))
            if s.top_p < 1.0:
                steps.append(api.llama_sampler_init_top_p(s.top_p, 1))
            if s.min_p > 0.0:
                steps.append(api.llama_sampler_init_min_p(s.min_p, 1))
            steps.append(api.llama_sampler_init_temp(s.temperature))
        return steps

    def close(self) -> None:
        """Free the grammar."""
        if self._grammar is not None:
            self._api.llama_sampler_free(self._grammar)
            self._grammar = None
