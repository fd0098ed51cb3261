"""f32 weights -> bytes in a GGUF quantization: gguf's numpy code, or llama.cpp's own where that has none (K-quants)."""

from __future__ import annotations

import ctypes

import gguf
import numpy as np
import numpy.typing as npt

from shardwise.stage.llama import library

QUANTIZATIONS = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
_BY_GGML = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"}


def quantize(weights: npt.NDArray[np.float32], name: str) -> npt.NDArray[np.generic]:
    """The same rows in the quantization `name`; the result's last dim is in bytes for block formats."""
    kind = gguf.GGMLQuantizationType[name]
    if name not in _BY_GGML:
        return gguf.quants.quantize(weights, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.ascontiguousarray(weights, dtype=np.float32)
    rows, columns = data.size // data.shape[-1], data.shape[-1]
    out = np.empty((rows, columns // block * size), dtype=np.uint8)
    base = library.ggml()
    base.ggml_quantize_chunk.restype = ctypes.c_size_t
    base.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    written = base.ggml_quantize_chunk(int(kind), data.ctypes.data, out.ctypes.data, 0, rows, columns, None)
    assert written == out.nbytes, f"{name}: {written} of {out.nbytes} bytes"
    return out.reshape(*weights.shape[:-1], -1)
