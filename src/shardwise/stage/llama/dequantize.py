"""Rows of quantized matrices as float32, by the functions that llama.cpp itself uses (`ggml_get_type_traits`).

Data: a byte matrix [R, row bytes] (contiguous rows, may be memory-mapped) and row numbers in, float32 [T, H] out. Fails
with `UsageError` for a type that ggml cannot turn into floats.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.errors import UsageError
from shardwise.stage.backend import Floats, Tokens
from shardwise.stage.llama import library
from shardwise.stage.llama.library import GGML_TYPE_F32


class _TypeTraits(ctypes.Structure):
    """The beginning of `struct ggml_type_traits` of ggml.h."""

    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    ]


class Dequantizer:
    """Turns rows of one ggml type into float32."""

    def __init__(self, ggml_type: int) -> None:
        ggml = library.ggml()
        ggml.ggml_get_type_traits.restype = ctypes.POINTER(_TypeTraits)
        ggml.ggml_get_type_traits.argtypes = [ctypes.c_int]
        traits = ggml.ggml_get_type_traits(ggml_type).contents
        self._is_f32 = ggml_type == GGML_TYPE_F32
        self._to_float: Any = traits.to_float
        if not self._is_f32 and not self._to_float:
            raise UsageError(f"ggml type {ggml_type} cannot be turned into floats", where="token_embd.weight")

    def rows(self, matrix: npt.NDArray[Any], numbers_T: Tokens, num_columns: int) -> Floats:
        """Rows [T, H] of a matrix; `num_columns` is H."""
        if self._is_f32:
            return np.ascontiguousarray(matrix[numbers_T], dtype=np.float32).reshape(len(numbers_T), num_columns)
        out_TH = np.empty((len(numbers_T), num_columns), dtype=np.float32)
        first, stride = matrix.ctypes.data, matrix.strides[0]
        target, step = out_TH.ctypes.data, out_TH.strides[0]
        for index, number in enumerate(numbers_T.tolist()):
            self._to_float(first + number * stride, target + index * step, num_columns)
        return out_TH
