"""Takes a lab down when its owner goes away without doing so (SIGKILL, power of a terminal, a crash).

**Promises** After the owner's end of the pipe (standard input) closes, the lab is gone within about a second, unless
the owner said `done` first. **Fails when** killed itself: then `shardwise bench lab clean` does the same.
**Called by** `Lab`, as `python -m shardwise.bench.lab.guard NUMBER`.
"""

from __future__ import annotations

import os
import signal
import sys

from shardwise.bench.lab.state import labs, tear_down


def main(number: int) -> None:
    """Wait for the owner's last word."""
    os.setsid()
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    if sys.stdin.buffer.read() != b"done":
        for state in labs():
            if state.number == number:
                tear_down(state)


if __name__ == "__main__":
    main(int(sys.argv[1]))
