"""Threads that only pass messages on ask the system to be run at once when there is something to do.

Where all cores compute, a thread that wakes up waits for the running one's time slice (3-4 ms on a common Linux). A thread that
asks for a short slice of its own goes first (Linux 6.12 and later; needs no rights, and takes no computing time from
anybody: it is only called sooner and stopped sooner). Elsewhere nothing changes.

**Promises:** never raises; child processes and threads do not inherit it. **Called by** the server, for its loop and
for the thread that brings the tokens.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

SLICE_S = 1e-4  # the shortest that the kernel takes
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274}  # the number of the system call
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period
_RESET_ON_FORK = 1


def prefer_promptness() -> bool:
    """For the calling thread; False where the system does not offer it."""
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)  # of this thread; it stays as it is
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, round(SLICE_S * 1e9), 0, 0)
    return int(ctypes.CDLL(None).syscall(number, 0, wanted, 0)) == 0
