"""Remembers across a cut how much of each piece is in the file already.

One line `file piece bytes` follows each write of data, so it never claims what was not written before; a torn last line is
ignored. It is a hint, not a proof: whoever resumes hashes what it claims. **Called by** the transfer.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

_LINE = re.compile(rb"^(\d{1,9}) (\d{1,9}) (\d{1,18})$")


class Journal:
    """An append-only file."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._done = _read(path)
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(self._handle, b"\n")  # closes a line that was torn

    def done(self, file: int, piece: int) -> int:
        """Bytes of this piece that are claimed."""
        return self._done.get((file, piece), 0)

    def note(self, file: int, piece: int, num_bytes: int) -> None:
        """The first `num_bytes` of this piece are in the file."""
        with self._lock:
            self._done[file, piece] = num_bytes
            os.write(self._handle, f"{file} {piece} {num_bytes}\n".encode())

    def close(self) -> None:
        os.close(self._handle)


def _read(path: Path) -> dict[tuple[int, int], int]:
    if not path.exists():
        return {}
    out: dict[tuple[int, int], int] = {}
    for line in path.read_bytes().split(b"\n")[:-1]:
        match = _LINE.match(line)
        if match:
            out[int(match[1]), int(match[2])] = int(match[3])
    return out
