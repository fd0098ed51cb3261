"""Memory bandwidth by STREAM's triad, a = b + s * c (McCalpin 1995), counted as STREAM counts: 24 bytes an element.

The arrays are larger than the last-level cache and are worked on in blocks that fit the second-level cache, so that
numpy's two passes touch main memory as one. One thread a core. **Called by** the node suite.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from shardwise.clock import Clock

_BLOCK_ELEMENTS = 16 * 1024  # 128 KiB of float64 an array
_BYTES_PER_ELEMENT = 24
_LEAST_BYTES = 24 * 2**20
METHOD = "triad, float64"


def triad_samples(total_bytes: int, num_threads: int, duration_s: float, clock: Clock) -> list[float]:
    """Bytes per second of each round within `duration_s`; at least three rounds."""
    elements = max(_LEAST_BYTES, total_bytes) // _BYTES_PER_ELEMENT // num_threads
    parts = [[np.full(elements, value) for value in (0.0, 1.0, 2.0)] for _ in range(num_threads)]
    samples: list[float] = []
    with ThreadPoolExecutor(max_workers=num_threads) as pool:
        list(pool.map(_triad, parts))
        end_s = clock.now_s() + duration_s
        while len(samples) < 3 or clock.now_s() < end_s:
            started_s = clock.now_s()
            list(pool.map(_triad, parts))
            samples.append(elements * num_threads * _BYTES_PER_ELEMENT / (clock.now_s() - started_s))
    return samples


def _triad(arrays: list[npt.NDArray[np.float64]]) -> None:
    a, b, c = arrays
    for start in range(0, len(a), _BLOCK_ELEMENTS):
        block = a[start : start + _BLOCK_ELEMENTS]
        np.multiply(c[start : start + _BLOCK_ELEMENTS], 3.0, out=block)
        np.add(block, b[start : start + _BLOCK_ELEMENTS], out=block)
