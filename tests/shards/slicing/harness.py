"""Logits of an unsharded model and of a chain of slices, for the same tokens in the same chunks.

The reference feeds token ids to llama.cpp itself; the chain goes through `slice_model` and `LlamaCppBackend`, one
after another in this process. Both contexts have the same settings, so the results must be equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.shards.slicing import slice_model
from shardwise.shards.stage_paths import StageFiles
from shardwise.stage.backend import BatchSegment
from shardwise.stage.llama import library
from shardwise.stage.llama.backend import LlamaCppBackend
from shardwise.stage.settings import BackendSettings

Floats = npt.NDArray[np.float32]
PROMPT_CHUNKS = (33, 24)  # tokens; longer than the tiny models' windows and, together, than longrope's short context
DECODE_TOKENS = 5
SETTINGS = BackendSettings(context_tokens=256, max_sessions=2, chunk_tokens=64, blas="auto")


def prompt(vocab_size: int, num_tokens: int = sum(PROMPT_CHUNKS)) -> npt.NDArray[np.int32]:
    """Token ids from all over the vocabulary."""
    return np.random.default_rng(7).integers(0, vocab_size, num_tokens, dtype=np.int32)


@contextmanager
def reference_context(path: Path, settings: BackendSettings) -> Iterator[tuple[Any, Any]]:
    """An unsharded llama.cpp context: (context, vocabulary size)."""
    api = library.load()
    library.choose_blas(settings.blas, "")
    params = api.llama_model_default_params()
    params.n_gpu_layers = settings.gpu_layers
    model = api.llama_model_load_from_file(str(path).encode(), params)
    assert model, library.take_log()
    options = api.llama_context_default_params()
    options.n_ctx, options.n_seq_max = settings.context_tokens * settings.max_sessions, settings.max_sessions
    options.n_batch = options.n_ubatch = settings.chunk_tokens
    options.n_threads = options.n_threads_batch = settings.threads
    options.kv_unified, options.swa_full, options.op_offload = False, True, False
    context = api.llama_init_from_model(model, options)
    assert context, library.take_log()
    try:
        yield context, int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)))
    finally:
        api.llama_free(context)
        api.llama_model_free(model)


def reference_logits(path: Path, chunks: Sequence[int] = PROMPT_CHUNKS, decode: int = DECODE_TOKENS) -> list[Floats]:
    """Logits of the last row of each prompt chunk, then of each greedily decoded token."""
    api = library.load()
    with reference_context(path, SETTINGS) as (context, vocab_size):

        def step(tokens: npt.NDArray[np.int32], position: int) -> Floats:
            batch = api.llama_batch_init(len(tokens), 0, 1)
            for row, token in enumerate(tokens):
                batch.token[row], batch.pos[row], batch.n_seq_id[row] = int(token), position + row, 1
                batch.seq_id[row][0], batch.logits[row] = 0, row == len(tokens) - 1
            batch.n_tokens = len(tokens)
            assert api.llama_decode(context, batch) == 0, library.take_log()
            logits = np.ctypeslib.as_array(api.llama_get_logits_ith(context, len(tokens) - 1), shape=(vocab_size,)).copy()
            api.llama_batch_free(batch)
            return logits

        return _drive(step, vocab_size, chunks, decode)


def _drive(step: Any, vocab_size: int, chunks: Sequence[int], decode: int) -> list[Floats]:
    tokens, position, out = prompt(vocab_size, sum(chunks)), 0, []
    for size in chunks:
        out.append(step(tokens[position : position + size], position))
        position += size
    for _ in range(decode):
        out.append(step(np.array([int(out[-1].argmax())], dtype=np.int32), position))
        position += 1
    return out


def chain_logits(files: Sequence[StageFiles], chunks: Sequence[int] = PROMPT_CHUNKS, decode: int = DECODE_TOKENS) -> list[Floats]:
    """The same from slices, one after another."""
    with ExitStack() as stack:
        stages = [stack.enter_context(closing(LlamaCppBackend(part, SETTINGS))) for part in files]

        def step(tokens: npt.NDArray[np.int32], position: int) -> Floats:
            x = stages[0].embed(tokens)
            segment = BatchSegment(slot=0, position=position, num_tokens=len(tokens), sample=True)
            for stage in stages[:-1]:
                activations = stage.forward([segment], x).activations_TH
                assert activations is not None
                x = activations
            logits = stages[-1].forward([segment], x).logits_SV
            assert logits is not None
            return logits[0].copy()

        return _drive(step, stages[-1].vocab_size, chunks, decode)


def cut(path: Path, cuts: Sequence[int], num_layers: int, directory: Path) -> list[StageFiles]:
    """Slices between the cuts."""
    borders = [0, *cuts, num_layers]
    return [slice_model(path, a, b, directory) for a, b in pairwise(borders)]


def largest_difference(one: Sequence[Floats], other: Sequence[Floats]) -> float:
    """Over all steps; 0.0 only if every bit of every logit is equal."""
    assert len(one) == len(other)
    if all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in zip(one, other, strict=True)):
        return 0.0
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True)) or float("inf")
