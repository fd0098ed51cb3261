"""llama.cpp as a library: loading, version, which of its backends are on, log lines.

The build links OpenBLAS from the PyPI package `scipy-openblas32`, which lives elsewhere in site-packages; it is loaded
first so that the dynamic linker finds it by its name. BLAS helps some quantizations in prefill and slows others
(docs/adr/0002-llama-build.md), so a process that serves one of the latter unloads ggml's BLAS backend.

Fails with `StageLoadFailed` where the library cannot be loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

from shardwise.errors import StageLoadFailed, pip_command
from shardwise.partial_import import import_alone

T = TypeVar("T")
# Where dequantizing to f32 for a BLAS product beats ggml's own kernels (prefill of 512, one thread; ADR 0002).
BLAS_HELPS = frozenset({"Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "Q8_0", "IQ4_XS", "IQ3_S"})
GGML_MAX_NAME = 64  # bytes of a tensor's name, ggml.h
GGML_TYPE_F32 = 0
_log_lines: list[str] = []
_BUFFER = re.compile(r"(KV|compute|output|model|RS) buffer size\s*=\s*([\d.]+) MiB")
_buffers: dict[str, int] = {}
_kept_alive: list[Any] = []


# OpenBLAS reads these when it is loaded. It would start a thread for every core, each of which waits busily for 50-80 ms:
# ggml says before each product how many it wants, and they are started then. Between products they would wait busily for 2^26
# cycles, on the cores that ggml's own threads need: a prompt took 30 times as long with two threads.
_OPENBLAS = {"OPENBLAS_NUM_THREADS": "1", "OPENBLAS_THREAD_TIMEOUT": "4"}


@contextlib.contextmanager
def _while_openblas_is_loaded() -> Iterator[None]:
    added = {name: value for name, value in _OPENBLAS.items() if name not in os.environ}  # whoever sets one has a reason
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _preload_openblas() -> None:
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec is None or not spec.submodule_search_locations:
        return
    for file in (Path(next(iter(spec.submodule_search_locations))) / "lib").glob("*scipy_openblas*"):
        if file.suffix in {".so", ".dylib", ".dll"}:
            if sys.platform == "win32":
                os.add_dll_directory(str(file.parent))
            with _while_openblas_is_loaded():
                ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def load() -> Any:
    """The module `llama_cpp.llama_cpp`, initialised once a process."""
    try:
        _preload_openblas()
        api: Any = import_alone("llama_cpp", "llama_cpp")
    except (ImportError, OSError, RuntimeError, FileNotFoundError) as error:
        raise StageLoadFailed(
            f"llama.cpp cannot be loaded: {error}", hint=pip_command("--force-reinstall llama-cpp-python")
        ) from error

    @api.llama_log_callback  # type: ignore[untyped-decorator]
    def on_log(level: int, text: bytes, _user: Any) -> None:
        if match := _BUFFER.search(text.decode(errors="replace")):
            _buffers[match.group(1)] = _buffers.get(match.group(1), 0) + round(float(match.group(2)) * 2**20)
        if level in (3, 4):  # warnings and errors
            _log_lines.append(text.decode(errors="replace").rstrip())
            del _log_lines[:-40]

    api.llama_log_set(on_log, None)
    _kept_alive.append(on_log)  # llama.cpp holds only the address
    interruptible(api.llama_backend_init)
    return api


def interruptible(call: Callable[[], T]) -> T:
    """Make a call during which llama.cpp logs, so that Ctrl-C is not lost.

    The main thread gets interrupts; one that came while it was in a callback of C would be printed and forgotten. Another
    thread therefore makes the call, and the main one waits.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    with ThreadPoolExecutor(1, thread_name_prefix="llama") as pool:
        return pool.submit(call).result()


def take_log() -> str:
    """llama.cpp's warnings and errors since the last call."""
    text = "; ".join(line for line in _log_lines if line)
    _log_lines.clear()
    return text


def take_buffers() -> dict[str, int]:
    """Bytes of the buffers that llama.cpp said it allocated since the last call, by kind: model, KV, RS, compute, output."""
    found = dict(_buffers)
    _buffers.clear()
    return found


def ggml() -> ctypes.CDLL:
    """ggml's functions, from the very copies that llama.cpp was linked with.

    Wheels hold each library under several names as separate files; opening one by a name of our choice would load a
    second copy with a registry of its own. The dynamic linker finds symbols of dependencies through the handle of
    libllama; on Windows, where it does not, a DLL of the same name is never loaded twice.
    """
    api = load()
    if os.name != "nt":
        return cast(ctypes.CDLL, api._lib)
    folder = Path(str(api.__file__)).parent / "lib"
    return _Joined([ctypes.CDLL(str(folder / f"{name}.dll")) for name in ("ggml", "ggml-base")])  # type: ignore[return-value]


class _Joined:
    """Several DLLs that look like one."""

    def __init__(self, parts: list[ctypes.CDLL]) -> None:
        self._parts = parts

    def __getattr__(self, name: str) -> Any:
        for part in self._parts:
            if hasattr(part, name):
                return getattr(part, name)
        raise AttributeError(name)


def _registry(name: bytes) -> int | None:
    lib = ggml()
    lib.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    lib.ggml_backend_reg_by_name.argtypes = [ctypes.c_char_p]
    found = lib.ggml_backend_reg_by_name(name)
    return int(found) if found else None


def has_blas() -> bool:
    """Whether ggml's BLAS backend is there in this process."""
    return _registry(b"BLAS") is not None


def choose_blas(mode: str, main_quantization: str) -> bool:
    """Switch BLAS off for this process where it does not help; returns whether it is on.

    `mode` is auto | on | off. Must come before the first model is loaded.
    """
    registry = _registry(b"BLAS")
    if registry is None:
        return False
    if mode == "on" or (mode == "auto" and main_quantization in BLAS_HELPS):
        return True
    lib = ggml()
    lib.ggml_backend_unload.argtypes = [ctypes.c_void_p]
    lib.ggml_backend_unload(registry)
    return False


def build_identity() -> str:
    """`llama.cpp 0.3.36`: what peers must have in common; how it was compiled may differ (`device_name`)."""
    return f"llama.cpp {package_version()}"


@functools.cache
def package_version() -> str:
    """Of `llama-cpp-python`. The name of the folder with its metadata tells; reading that takes `importlib.metadata` 20 ms."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is not None and spec.origin is not None:
        folders = list(Path(spec.origin).parent.parent.glob("llama_cpp_python-*.dist-info"))
        if len(folders) == 1:
            return folders[0].name.removesuffix(".dist-info").split("-", 1)[1]
    from importlib.metadata import version  # here, because it is the way that costs

    return version("llama-cpp-python")


@functools.cache
def device_name() -> str:
    """What this build computes on, for people: `cpu openblas`, `cuda`; taken before `choose_blas` changes it."""
    load()
    found = [name for name in ("CUDA", "Metal", "Vulkan", "ROCm", "SYCL") if _registry(name.encode())]
    return " ".join(name.lower() for name in found) or ("cpu openblas" if has_blas() else "cpu")


def describe() -> str:
    """`llama.cpp 0.3.36 openblas`: what rates and bit-equality depend on."""
    return f"{build_identity()}{' openblas' if has_blas() else ''}"
