"""Whether the stages fit into memory, asked before anything is loaded."""

from __future__ import annotations

from shardwise import memory
from shardwise.deploy.options import RunOptions
from shardwise.errors import StageOutOfMemory
from shardwise.model.description import ModelDescription

RUNTIME_BYTES = 110 * 2**20  # interpreter, numpy, llama.cpp, buffers of a worker (measured, benchmarks/evidence.md)


def stage_bytes(model: ModelDescription, start: int, end: int, options: RunOptions) -> int:
    """Weights, KV of all sessions and the runtime of one stage."""
    kv = model.kv_bytes_per_token(start, end, options.kv_type) * options.context_tokens * options.max_sessions
    return model.stage_weight_bytes(start, end) + round(kv) + RUNTIME_BYTES


def require_memory(model: ModelDescription, options: RunOptions, available_bytes: int | None = None) -> None:
    """`StageOutOfMemory` with bytes where all stages together do not fit this machine."""
    available = memory.available_bytes() if available_bytes is None else available_bytes
    start, needed = 0, 0
    for count in options.layer_counts(model):
        needed += stage_bytes(model, start, start + count, options)
        start += count
    if needed > available:
        raise StageOutOfMemory(
            f"the stages need {needed} bytes, {available} are free",
            where=model.name,
            hint="lower --ctx or --sessions, take a smaller quantization, or more machines",
            needed_bytes=needed,
            available_bytes=available,
        )
