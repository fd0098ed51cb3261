"""A worker's life ends with its standard input: the pipe closes when the parent is gone, however it died.

**Called by** the workers of `stage` and `probe`, once they have read their configuration from it.
"""

from __future__ import annotations

import os
import sys
import threading


def end_with_input() -> None:
    """End this process as soon as the other end of its standard input closes, whatever it is doing."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 65536):
            continue
        os._exit(0)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
