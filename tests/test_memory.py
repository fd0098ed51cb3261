"""Memory as the system tells it, beside psutil."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from shardwise.memory import available_bytes, peak_resident_bytes, resident_bytes

MIB = 2**20


def test_of_this_process() -> None:
    assert resident_bytes() == pytest.approx(psutil.Process().memory_info().rss, abs=16 * MIB)
    assert resident_bytes(os.getpid()) == pytest.approx(resident_bytes(), abs=16 * MIB)
    assert peak_resident_bytes() >= resident_bytes() - MIB


def test_of_one_that_has_ended() -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait(timeout=20)
    assert resident_bytes(ended.pid) == 0


def test_what_is_free() -> None:
    assert available_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.2, abs=256 * MIB)
