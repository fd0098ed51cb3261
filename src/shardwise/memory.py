"""What memory a process has, and what is free on this machine.

Linux tells in /proc; elsewhere psutil does, which takes every process 10 ms to load. **Promises** never to raise for a process
that has just ended: it has 0 bytes.
"""

from __future__ import annotations

import sys


def available_bytes() -> int:
    """What a new process could take without swapping."""
    if sys.platform == "linux" and (found := _field("/proc/meminfo", "MemAvailable:")):
        return found
    import psutil  # see the module

    return int(psutil.virtual_memory().available)


def resident_bytes(pid: int | None = None) -> int:
    """Resident set of a process, by default this one."""
    return _field(f"/proc/{pid or 'self'}/status", "VmRSS:") if sys.platform == "linux" else _resident_elsewhere(pid)


def peak_resident_bytes() -> int:
    """Largest resident set of this program so far."""
    # getrusage would count what the parent had before this program was started
    if sys.platform == "linux" and (found := _field("/proc/self/status", "VmHWM:")):
        return found
    if sys.platform == "win32":
        import psutil  # see the module

        return int(psutil.Process().memory_info().peak_wset)
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def _resident_elsewhere(pid: int | None) -> int:
    import psutil  # see the module

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _field(file: str, name: str) -> int:
    """Bytes of a line such as `VmRSS:  1234 kB`; 0 where there is none."""
    try:
        with open(file, encoding="ascii", errors="replace") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)
    except OSError:
        return 0
