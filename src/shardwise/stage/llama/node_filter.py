"""The filter of graph nodes in C (`node_filter.c`), where it was compiled: 0.2-0.3 ms less a token and stage.

Data: the wanted names and a Python callback in; an address of a C function and its user data out. Without a compiler at
installation there is no filter, and the Python callback is asked for every node: the same results, a little later.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from typing import Any

from shardwise.stage.llama.library import GGML_MAX_NAME

MAX_WANTED = 2


class NodeFilterState(ctypes.Structure):
    """`struct node_filter` of node_filter.c."""

    _fields_ = [
        ("name_offset", ctypes.c_size_t),
        ("num_wanted", ctypes.c_size_t),
        ("lengths", ctypes.c_size_t * MAX_WANTED),
        ("names", ctypes.c_char * GGML_MAX_NAME * MAX_WANTED),
        ("matched", ctypes.c_void_p),
    ]


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The compiled filter, or None where the installation has none."""
    spec = importlib.util.find_spec("shardwise.stage.llama._node_filter")
    return ctypes.CDLL(spec.origin) if spec is not None and spec.origin else None


class NodeFilter:
    """Keeps alive what llama.cpp only has addresses of."""

    def __init__(self, library: ctypes.CDLL, wanted: list[bytes], name_offset: int, matched: Any) -> None:
        """`wanted`: names with their final 0 byte; `matched`: a ctypes callback (tensor, ask, user) -> bool."""
        self.state = NodeFilterState(name_offset=name_offset, num_wanted=len(wanted))
        for index, name in enumerate(wanted):
            self.state.lengths[index] = len(name)
            ctypes.memmove(self.state.names[index], name, len(name))
        self.state.matched = ctypes.cast(matched, ctypes.c_void_p)
        self._matched = matched
        self.function = library.shardwise_filter_node

    @property
    def user_data(self) -> int:
        return ctypes.addressof(self.state)
