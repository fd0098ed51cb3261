"""What the operating system says about a process that is not heard: stopped, waiting for a disk, or without a processor.

pid -> /proc (Linux) or psutil -> `Scheduling`. **Promises** never to raise for a process that has just ended: then nothing is
known (`state` ""). Where the system does not count waiting times `delay_s` stays 0. **Called by** `process`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from shardwise.records import Record

_LETTERS = {"R": "running", "S": "sleeping", "I": "sleeping", "D": "blocked", "T": "stopped", "t": "stopped"}
_WORDS = {  # psutil's, which is loaded where it is needed only
    "running": "running",
    "sleeping": "sleeping",
    "idle": "sleeping",
    "disk-sleep": "blocked",
    "stopped": "stopped",
    "tracing-stop": "stopped",
}


class Scheduling(Record):
    """How a process stands with its system's scheduler."""

    state: str = ""  # running | sleeping | blocked (a thread waits for a disk, not to be interrupted) | stopped | "" = unknown
    num_ready: int = 0  # threads that run, or would if they had a processor
    delay_s: float = 0.0  # since its start: ready to run without a processor, all its threads together
    compute_s: float = 0.0  # since its start: on a processor


UNKNOWN = Scheduling()


def scheduling_of(pid: int) -> Scheduling:
    """Now."""
    return _from_proc(Path(f"/proc/{pid}/task")) if sys.platform == "linux" else _from_psutil(pid)


def _from_proc(tasks: Path) -> Scheduling:
    """`stat` has a thread's state, `schedstat` its nanoseconds on and waiting for a processor (counted when it gets one)."""
    letters, compute_ns, delay_ns = "", 0, 0
    try:
        for task in tasks.iterdir():
            letters += (task / "stat").read_text(encoding="ascii", errors="replace").rpartition(") ")[2][:1]
            on, waited, _ = (task / "schedstat").read_text(encoding="ascii").split()
            compute_ns, delay_ns = compute_ns + int(on), delay_ns + int(waited)
    except (OSError, ValueError):  # it (or a thread) ended, or this kernel does not count
        return UNKNOWN
    states = {_LETTERS.get(letter, "") for letter in letters}
    state = next((one for one in ("stopped", "blocked", "running", "sleeping") if one in states), "")
    return Scheduling(state=state, num_ready=letters.count("R"), delay_s=delay_ns / 1e9, compute_s=compute_ns / 1e9)


def _from_psutil(pid: int) -> Scheduling:
    import psutil

    try:
        process = psutil.Process(pid)
        user_s, system_s = process.cpu_times()[:2]
        return Scheduling(state=_WORDS.get(process.status(), ""), compute_s=user_s + system_s)
    except psutil.Error:
        return UNKNOWN
