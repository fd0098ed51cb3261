"""How a stage computes, as its worker is told: a record that is read and written without any library that computes."""

from __future__ import annotations

from shardwise.records import Record

WIRE_DTYPES = ("f32", "f16")  # what activations are sent as (`execute` knows how)


class BackendSettings(Record):
    """What a backend needs to know beside its slice."""

    context_tokens: int = 2048  # per session
    max_sessions: int = 4
    chunk_tokens: int = 64  # most rows of one prefill chunk
    kv_type: str = "f16"  # f16 | q8_0
    threads: int = 1  # 0 = the cores of this machine but one, shared by `stages_here`
    stages_here: int = 1  # of the deployment, on this machine
    gpu_layers: int = 0
    blas: str = "auto"  # auto (by quantization) | on | off
    use_mmap: bool = True
