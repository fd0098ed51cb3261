"""Put on a worker's PYTHONPATH by `bench.truth` only: every activation that leaves the stage costs a copy of 1 MB more.

What it costs is timed here and written to the file named by SHARDWISE_INJECTED now and then, so that the
finding can be compared with the truth. Nothing else ever imports this.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy

from shardwise.clock import SystemClock
from shardwise.stage import execute

_clock = SystemClock()
_block = numpy.ones(2**20, dtype=numpy.uint8)
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
        _times_s.append(_clock.now_s() - start_s)
        if len(_times_s) == _EVERY:
            _write()
        return numpy.ascontiguousarray(*args, **options)


def _write() -> None:
    with open(os.environ["SHARDWISE_INJECTED"], "a", encoding="utf-8") as file:
        file.write(json.dumps(_times_s) + "\n")
    _times_s.clear()


setattr(execute, "np", _Copying())  # noqa: B010  mypy knows `np` as a module
