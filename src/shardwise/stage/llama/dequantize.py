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
from shardwise.stage.backend import Floats
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


class MatrixRows:
    """A byte matrix [R, row bytes] of one ggml type, row by row as float32."""

    def __init__(self, matrix: npt.NDArray[Any], ggml_type: int, num_columns: int) -> None:
        """`num_columns` is H."""
        ggml = library.ggml()
        ggml.ggml_get_type_traits.restype = ctypes.POINTER(_TypeTraits)
        ggml.ggml_get_type_traits.argtypes = [ctypes.c_int]
        traits = ggml.ggml_get_type_traits(ggml_type).contents
        self._is_f32 = ggml_type == GGML_TYPE_F32
        self._to_float: Any = traits.to_float
        if not self._is_f32 and not self._to_float:
            raise UsageError(f"ggml type {ggml_type} cannot be turned into floats", where="token_embd.weight")
        self._matrix, self._num_columns = matrix, num_columns
        self._address, self._stride = int(matrix.ctypes.data), int(matrix.strides[0])

    def take(self, numbers: list[int]) -> Floats:
        """Rows [T, H] by their numbers, which must be in range."""
        if self._is_f32:
            return np.ascontiguousarray(self._matrix[numbers], dtype=np.float32).reshape(len(numbers), self._num_columns)
        out_TH = np.empty((len(numbers), self._num_columns), dtype=np.float32)
        if not numbers:
            return out_TH
        target, step = ctypes.addressof(ctypes.c_char.from_buffer(out_TH.data)), out_TH.strides[0]
        for number in numbers:
            self._to_float(self._address + number * self._stride, target, self._num_columns)
            target += step
        return out_TH
