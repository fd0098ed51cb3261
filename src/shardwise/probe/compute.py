"""Dense compute: a float32 matrix product through numpy's BLAS, as a ceiling; what the backend reaches is in the rates."""

from __future__ import annotations

import numpy as np

from shardwise.clock import Clock

_SIZE = 1024
METHOD = f"float32 product of {_SIZE} x {_SIZE} matrices"


def compute_samples(duration_s: float, clock: Clock) -> list[float]:
    """FLOP/s of each product within `duration_s`; at least three."""
    random = np.random.default_rng(0)
    left_MK = random.standard_normal((_SIZE, _SIZE), dtype=np.float32)
    right_KN = random.standard_normal((_SIZE, _SIZE), dtype=np.float32)
    out_MN = left_MK @ right_KN
    samples: list[float] = []
    end_s = clock.now_s() + duration_s
    while len(samples) < 3 or clock.now_s() < end_s:
        started_s = clock.now_s()
        np.matmul(left_MK, right_KN, out=out_MN)
        samples.append(2.0 * _SIZE**3 / (clock.now_s() - started_s))
    return samples
