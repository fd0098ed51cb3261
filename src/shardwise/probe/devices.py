"""Accelerators that the installed llama.cpp can use, with their memory, asked of ggml itself.

**Promises** the devices that a stage with `gpu_layers` would run on, in ggml's order; an integrated GPU shares the
machine's memory and says so. **Fails when** llama.cpp cannot be loaded (`StageLoadFailed`). A machine without one gives
an empty list. **Called by** the node suite, `doctor`.
"""

from __future__ import annotations

import ctypes

from shardwise.records import Record
from shardwise.stage.llama import library

_CPU, _GPU, _INTEGRATED = 0, 1, 2  # enum ggml_backend_dev_type
_KINDS = {"cuda": "cuda", "rocm": "cuda", "hip": "cuda", "metal": "metal", "mtl": "metal", "vulkan": "vulkan", "sycl": "vulkan"}


class Accelerator(Record):
    """One GPU."""

    kind: str  # cuda | metal | vulkan
    name: str
    free_bytes: int
    total_bytes: int
    integrated: bool  # its memory is the machine's


def list_accelerators() -> list[Accelerator]:
    """All GPUs that ggml found."""
    lib = library.ggml()
    for name, result in (
        ("ggml_backend_dev_count", ctypes.c_size_t),
        ("ggml_backend_dev_get", ctypes.c_void_p),
        ("ggml_backend_dev_name", ctypes.c_char_p),
        ("ggml_backend_dev_description", ctypes.c_char_p),
        ("ggml_backend_dev_type", ctypes.c_int),
    ):
        getattr(lib, name).restype = result
    lib.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    for name in ("ggml_backend_dev_name", "ggml_backend_dev_description", "ggml_backend_dev_type"):
        getattr(lib, name).argtypes = [ctypes.c_void_p]
    lib.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)]
    found = []
    for index in range(lib.ggml_backend_dev_count()):
        device = lib.ggml_backend_dev_get(index)
        kind = lib.ggml_backend_dev_type(device)
        if kind not in (_GPU, _INTEGRATED):
            continue
        free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
        lib.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        short = lib.ggml_backend_dev_name(device).decode(errors="replace")
        found.append(
            Accelerator(
                kind=kind_of(short),
                name=lib.ggml_backend_dev_description(device).decode(errors="replace") or short,
                free_bytes=free.value,
                total_bytes=total.value,
                integrated=kind == _INTEGRATED,
            )
        )
    return found


def kind_of(name: str) -> str:
    """`CUDA0` -> cuda, `MTL0` -> metal, `Vulkan1` -> vulkan; anything else counts as vulkan, the most general."""
    lower = name.lower()
    return next((kind for prefix, kind in _KINDS.items() if lower.startswith(prefix)), "vulkan")
