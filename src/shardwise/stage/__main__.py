"""`python -m shardwise.stage`: one stage worker, configured on standard input, logging to standard error.

It ends when it is told to (`Shutdown`), when the driver refuses it (exit status 4), when its standard input closes (the
parent is gone, however it died), or when it cannot load, which the driver hears as `Failure`. A native crash leaves a
traceback of all threads in the log.
"""

from __future__ import annotations

import faulthandler
import gc
import signal
import sys


def main() -> int:
    """Run one worker; the exit status is 0 after a clean end."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    gc.disable()  # what imports make stays: looking for garbage in it would take a tenth of their time, and is not done later
    from shardwise.stage.serve import serve

    gc.freeze()
    gc.enable()
    return serve()


if __name__ == "__main__":
    sys.exit(main())
