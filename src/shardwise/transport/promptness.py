"""Threads that only pass messages on ask the system to be run at once when there is something to do.

Where all cores compute, a thread that wakes up waits for the running one's time slice (3-4 ms on a common Linux). A thread that
asks for a short slice of its own goes first (Linux 6.12 and later; needs no rights, and takes no computing time from
anybody: it is only called sooner and stopped sooner). Elsewhere nothing changes.

**Promises:** never raises; child processes do not inherit it, threads only where that is asked for. **Called by** the server,
for its loop; the session driver, for its thread; and for the threads of ZeroMQ that carry activations or tokens
(`prompt_context`).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading

import zmq

SLICE_S = 1e-4  # the shortest that the kernel takes
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274}  # the number of the system call
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period
_RESET_ON_FORK = 1


def prefer_promptness(slice_s: float = SLICE_S, *, inherited: bool = False) -> bool:
    """For the calling thread, and those it starts where `inherited`; False where the system does not offer it.

    A longer slice is a little less prompt, and is not cut off before it has passed.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)  # of this thread; it stays as it is
    wanted = _ATTRIBUTES.pack(
        _ATTRIBUTES.size, os.SCHED_OTHER, 0 if inherited else _RESET_ON_FORK, nice, 0, round(slice_s * 1e9), 0, 0
    )
    return int(ctypes.CDLL(None).syscall(number, 0, wanted, 0)) == 0


def prompt_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A ZeroMQ context whose own threads, which carry the messages, are prompt. They start with its first socket."""
    made: list[zmq.Context[zmq.Socket[bytes]]] = []

    def make() -> None:
        prefer_promptness(inherited=True)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.socket(zmq.PAIR).close(linger=0)
        made.append(context)

    maker = threading.Thread(target=make, name="makes-zmq-threads")
    maker.start()
    maker.join()
    return made[0]
