"""`shardwise serve` as a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .running import wait_until

PROGRAM = [sys.executable, "-m", "shardwise"]


@contextmanager
def serving(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A `shardwise serve` process, its address, and its lines so far; ended with SIGKILL if it must be."""
    command = [*PROGRAM, "serve", "sample", "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    lines: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stderr.readline, "")), daemon=True)  # type: ignore[union-attr]
    reader.start()
    try:
        wait_until(lambda: "http://" in "".join(lines) or process.poll() is not None, 60, "the address")
        found = re.search(r"http://[\d.:]+", "".join(lines))
        assert found, lines
        yield process, found.group(), lines
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=30)
        reader.join(timeout=10)
        process.stderr.close()
        assert process.stdout is not None
        process.stdout.close()
