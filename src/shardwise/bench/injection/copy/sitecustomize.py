"""Put on a worker's PYTHONPATH by `bench.truth` only: each activation that leaves the stage costs a copy of SHARDWISE_COPY_BYTES.

What the conversion takes with the copy is written to the file named by SHARDWISE_INJECTED now and then, so that the
finding can be compared with the truth. The run without a fault has the same code with 0 bytes, because what this code
itself takes is not the copy's (after a step it is not in the caches). Nothing else ever imports this.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy

from shardwise.clock import SystemClock
from shardwise.stage import execute

_clock = SystemClock()
_block = numpy.ones(int(os.environ["SHARDWISE_COPY_BYTES"]), dtype=numpy.uint8)
_times_s: list[float] = []
_EVERY = 40


class _Copying:
    """numpy, but for one function."""

    def __getattr__(self, name: str) -> Any:
        return getattr(numpy, name)

    @staticmethod
    def ascontiguousarray(*args: Any, **options: Any) -> Any:
        start_s = _clock.now_s()
        _block.copy()
        out = numpy.ascontiguousarray(*args, **options)
        _times_s.append(_clock.now_s() - start_s)
        if len(_times_s) == _EVERY:
            _write()
        return out


def _write() -> None:
    with open(os.environ["SHARDWISE_INJECTED"], "a", encoding="utf-8") as file:
        file.write(json.dumps(_times_s) + "\n")
    _times_s.clear()


setattr(execute, "np", _Copying())  # noqa: B010  mypy knows `np` as a module
