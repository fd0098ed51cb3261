"""Put on a worker's PYTHONPATH by `bench.truth` only: every activation that leaves the stage costs a copy of 1 MB more.

What the conversion takes with the copy, less what the first ones took without, is written to the file named by
SHARDWISE_INJECTED now and then, so that the finding can be compared with the truth. Nothing else ever imports this.
"""

from __future__ import annotations

import json
import os
import statistics
from typing import Any

import numpy

from shardwise.clock import SystemClock
from shardwise.stage import execute

_clock = SystemClock()
_block = numpy.ones(2**20, dtype=numpy.uint8)
_plain_s: list[float] = []
_times_s: list[float] = []
_NUM_PLAIN, _EVERY = 8, 40  # the plain ones are the warm-up: one chunk of the prompt, seven tokens


class _Copying:
    """numpy, but for one function."""

    def __getattr__(self, name: str) -> Any:
        return getattr(numpy, name)

    @staticmethod
    def ascontiguousarray(*args: Any, **options: Any) -> Any:
        start_s = _clock.now_s()
        if len(_plain_s) < _NUM_PLAIN:
            out = numpy.ascontiguousarray(*args, **options)
            _plain_s.append(_clock.now_s() - start_s)
            return out
        _block.copy()
        out = numpy.ascontiguousarray(*args, **options)
        _times_s.append(_clock.now_s() - start_s)
        if len(_times_s) == _EVERY:
            _write()
        return out


def _write() -> None:
    with open(os.environ["SHARDWISE_INJECTED"], "a", encoding="utf-8") as file:
        plain_s = statistics.median(_plain_s[1:])
        file.write(json.dumps([value - plain_s for value in _times_s]) + "\n")
    _times_s.clear()


setattr(execute, "np", _Copying())  # noqa: B010  mypy knows `np` as a module
