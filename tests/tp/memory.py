"""Watches the anonymous memory of this process (Linux)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def peak_anonymous(samples: list[int]) -> Iterator[None]:
    """Appends the highest anonymous memory (bytes) seen while the body ran, above that at its start."""
    stop, start = threading.Event(), anonymous_bytes()
    top = [start]

    def watch() -> None:
        while not stop.wait(0.001):
            top[0] = max(top[0], anonymous_bytes())

    thread = threading.Thread(target=watch, name="tp-memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        samples.append(max(top[0], anonymous_bytes()) - start)


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0
