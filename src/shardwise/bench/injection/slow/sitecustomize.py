"""Put on a worker's PYTHONPATH by `LoopbackLab` for slow hosts: what a step computes takes `1 / speed` times as long.

SHARDWISE_SPEED names a file of one float64, read at every step, so that the speed can be changed while the worker runs.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import mmap
import os
import struct
import sys
from pathlib import Path
from typing import Any

from shardwise.clock import SystemClock
from shardwise.stage.llama.backend import LlamaCppBackend

_clock = SystemClock()
with open(os.environ["SHARDWISE_SPEED"], "rb") as _file:
    _speed = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)
_forward = LlamaCppBackend.forward


def _slow_forward(self: LlamaCppBackend, *args: Any, **options: Any) -> Any:
    start_s = _clock.now_s()
    output = _forward(self, *args, **options)
    end_s = start_s + (_clock.now_s() - start_s) / struct.unpack("=d", _speed[:8])[0]
    _clock.sleep(end_s - _clock.now_s())
    return output


LlamaCppBackend.forward = _slow_forward  # type: ignore[method-assign]

_here = Path(__file__).parent
_others = [entry for entry in sys.path if Path(entry or ".").resolve() != _here]
_next = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)  # another one behind this is still to be heard
if _next is not None and _next.loader is not None:
    _next.loader.exec_module(importlib.util.module_from_spec(_next))
