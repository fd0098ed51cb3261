"""The unsharded reference: llama.cpp itself, the same library, the same chunk sizes, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.stage.llama import library
from shardwise.stage.llama.sampling import Sampler
from shardwise.transport.messages import SamplingSettings


class Unsharded:
    """One llama.cpp context over the whole model, fed with token ids."""

    def __init__(self, path: str, *, context_tokens: int, chunk_tokens: int, quantization: str, kv_type: int = 1) -> None:
        self._api = library.load()
        library.choose_blas("auto", quantization)
        self._model = self._api.llama_model_load_from_file(path.encode(), self._api.llama_model_default_params())
        assert self._model
        params = self._api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context_tokens, chunk_tokens, chunk_tokens
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = kv_type
        self._context = self._api.llama_init_from_model(self._model, params)
        assert self._context
        self.vocab = self._api.llama_model_get_vocab(self._model)
        self.vocab_size = int(self._api.llama_vocab_n_tokens(self.vocab))
        self._chunk = chunk_tokens
        self._last_prompt: tuple[list[int], npt.NDArray[np.float32]] = ([], np.empty(0, np.float32))

    def _decode(self, tokens: list[int]) -> None:
        array = (self._api.llama_token * len(tokens))(*tokens)
        assert self._api.llama_decode(self._context, self._api.llama_batch_get_one(array, len(tokens))) == 0

    def _logits(self) -> npt.NDArray[np.float32]:
        pointer = self._api.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(pointer, shape=(self.vocab_size,)).copy()

    def prefill(self, prompt: list[int]) -> npt.NDArray[np.float32]:
        """Logits [V] of the last prompt token."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        for start in range(0, len(prompt), self._chunk):
            self._decode(prompt[start : start + self._chunk])
        logits_V = self._logits()
        self._last_prompt = (list(prompt), logits_V.copy())
        return logits_V

    def prompt_logits(self, prompt: list[int]) -> npt.NDArray[np.float32]:
        """As `prefill`; not computed again where it was the last prompt."""
        known, logits_V = self._last_prompt
        return logits_V if known == prompt else self.prefill(prompt)

    def step(self, token: int) -> npt.NDArray[np.float32]:
        """Logits [V] after one more token."""
        self._decode([token])
        return self._logits()

    def generate(self, prompt: list[int], num_tokens: int, settings: SamplingSettings | None = None) -> list[int]:
        """Token ids, end-of-text ignored."""
        sampler = Sampler(settings or SamplingSettings(), lambda: self.vocab, self.vocab_size)
        logits_V = self.prefill(prompt)
        history = list(prompt)
        while True:
            history.append(sampler.choose(logits_V, history, len(history)).token)
            if len(history) - len(prompt) == num_tokens:
                return history[len(prompt) :]
            self._decode(history[-1:])
            logits_V = self._logits()

    def close(self) -> None:
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)


@contextmanager
def unsharded(path: Any, **settings: Any) -> Iterator[Unsharded]:
    """An `Unsharded` that is freed at the end."""
    reference = Unsharded(str(path), **settings)
    try:
        yield reference
    finally:
        reference.close()
