"""Takes a layer's output out of a running llama.cpp graph, and ends the graph there.

llama.cpp asks the callback of `cb_eval` for every graph node whether it wants it. The tap says yes to one node, copies
its rows when it has been computed, and answers *false*, so that the rest of the graph (final norm and head) is not
computed at all. A batch may run as several graphs; their rows arrive in order. Where the native filter was compiled
(`node_filter`), only the wanted node enters Python.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from shardwise.stage.backend import Floats
from shardwise.stage.llama import library
from shardwise.stage.llama.library import GGML_MAX_NAME, GGML_TYPE_F32
from shardwise.stage.llama.node_filter import NodeFilter, native_library


class GgmlTensor(ctypes.Structure):
    """`struct ggml_tensor` of ggml.h."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * GGML_MAX_NAME),
    ]


_NAME_OFFSET = GgmlTensor.name.offset


class LayerTap:
    """The callback object of one context.

    `output_node`: its rows are taken and the graph ends there ("" = none). `input_node`: is overwritten with the stage's
    input, for architectures that change their input before the first layer ("" = none).
    """

    def __init__(self, api: Any, output_node: str, input_node: str) -> None:
        self._output = output_node.encode() + b"\0" if output_node else b""
        self._input = input_node.encode() + b"\0" if input_node else b""
        self._length = max(len(self._output), len(self._input))
        self._rows: list[Floats] = []
        self._pending_TH: Floats = np.empty((0, 0), dtype=np.float32)
        base = library.ggml()
        for name in ("ggml_backend_tensor_get", "ggml_backend_tensor_set"):
            getattr(base, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self._tensor_get, self._tensor_set = base.ggml_backend_tensor_get, base.ggml_backend_tensor_set
        self._python_callback = api.ggml_backend_sched_eval_callback(self._on_both if self._input else self._on_output)
        self.callback: Any = self._python_callback
        self.user_data: int | None = None
        if (native := native_library()) is not None:
            wanted = [name for name in (self._output, self._input) if name]
            self._filter = NodeFilter(native, wanted, _NAME_OFFSET, self._python_callback)
            self.callback = ctypes.cast(self._filter.function, api.ggml_backend_sched_eval_callback)
            self.user_data = self._filter.user_data

    def begin(self, x_TH: Floats) -> None:
        """A batch with the input [T, H] follows."""
        self._rows = []
        self._pending_TH = x_TH

    def take(self) -> Floats:
        """The rows of the last batch, [T, H]."""
        rows, self._rows = self._rows, []
        if len(rows) == 1:
            return rows[0]
        return np.concatenate(rows) if rows else np.empty((0, 0), dtype=np.float32)

    def _on_output(self, tensor: int, ask: bool, _user: Any, string_at: Any = ctypes.string_at) -> bool:
        if ask:
            return bool(string_at(tensor + _NAME_OFFSET, self._length) == self._output)
        self._read(tensor)
        return False

    def _on_both(self, tensor: int, ask: bool, _user: Any) -> bool:
        name = ctypes.string_at(tensor + _NAME_OFFSET, GGML_MAX_NAME)
        is_input, is_output = name.startswith(self._input), bool(self._output) and name.startswith(self._output)
        if ask:
            return is_input or is_output
        if is_output:
            self._read(tensor)
            return False
        self._write(tensor)
        return True

    def _read(self, address: int) -> None:
        tensor = GgmlTensor.from_address(address)
        if tensor.type != GGML_TYPE_F32:
            return  # `forward` sees the missing rows and reports them
        rows_TH = np.empty((tensor.ne[1], tensor.ne[0]), dtype=np.float32)
        self._tensor_get(address, rows_TH.ctypes.data, 0, rows_TH.nbytes)
        self._rows.append(rows_TH)

    def _write(self, address: int) -> None:
        rows = int(GgmlTensor.from_address(address).ne[1])
        part_TH, self._pending_TH = self._pending_TH[:rows], self._pending_TH[rows:]
        self._tensor_set(address, part_TH.ctypes.data, 0, part_TH.nbytes)
