"""How many bytes llama.cpp keeps for one session at several lengths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp

STEPS = (4, 8, 64)  # tokens fed one step after another


@dataclass(frozen=True)
class CacheSizes:
    bytes_per_token_early: float  # while every window has room
    constant_bytes: float  # what is there without any token: recurrent state
    growth_12_to_76_bytes: int


def cache_sizes(path: Path) -> CacheSizes:
    """Feed a tiny model and ask for the size of the session's state after each step."""
    llama_cpp.llama_log_set(_silent, llama_cpp.ctypes.c_void_p(0))
    model: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    assert model, path
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.swa_full = 256, 64, 64, 1, False
    context: Any = llama_cpp.llama_init_from_model(model, params)
    assert context
    try:
        sizes, position = [], 0
        for count in STEPS:
            _feed(context, count, position)
            position += count
            sizes.append(int(llama_cpp.llama_state_seq_get_size(context, 0)))
    finally:
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)
    per_token = (sizes[1] - sizes[0]) / STEPS[1]
    return CacheSizes(per_token, sizes[0] - STEPS[0] * per_token, sizes[2] - sizes[1])


@llama_cpp.llama_log_callback
def _silent(_level: int, _text: bytes, _data: Any) -> None:
    return None


def _feed(context: Any, count: int, position: int) -> None:
    batch = llama_cpp.llama_batch_init(count, 0, 1)
    batch.n_tokens = count
    for row in range(count):
        batch.token[row], batch.pos[row], batch.n_seq_id[row] = 5, position + row, 1
        batch.seq_id[row][0], batch.logits[row] = 0, row == count - 1
    assert llama_cpp.llama_decode(context, batch) == 0
    llama_cpp.llama_batch_free(batch)
