"""How many cores this process may use, and how many threads a stage takes where it may choose (`--threads 0`).

One core is left: to the driver, to the threads that carry messages, and to whatever else the machine does. The threads of a
computation wait for each other by spinning; where one of them loses its core for a time slice, all the others wait that long.
"""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_threads(num_stages: int = 1) -> int:
    """Of each of `num_stages` stages on this machine: all cores but one, shared between them."""
    return max(1, (usable_cores() - 1) // max(1, num_stages))
