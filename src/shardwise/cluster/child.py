"""What every worker process runs first: it ties its life to its parent's, then becomes the worker's module.

    python -m shardwise.cluster.child MODULE

**Promises** on Linux the kernel kills this process when the thread that started it ends (also while it is stopped or
busy in native code); on other POSIX systems a thread looks for a changed parent; everywhere the module itself must end
when its standard input does. **Called by** `process`.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading

from shardwise.clock import SystemClock

_PR_SET_PDEATHSIG = 1
_LOOK_EVERY_S = 0.5


def die_with_parent() -> None:
    """Ask the system to end this process with its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    elif os.name == "posix":
        threading.Thread(target=_watch, args=(os.getppid(),), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    clock = SystemClock()
    while os.getppid() == parent:
        clock.sleep(_LOOK_EVERY_S)
    os._exit(0)


def main() -> None:
    """Become the module named on the command line."""
    die_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
