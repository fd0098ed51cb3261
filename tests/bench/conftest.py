"""Fixtures of the bench room: a skip reason where namespaces cannot be had (CI runs as root and never skips)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from shardwise.bench.lab import lab_unavailable
from shardwise.bench.lab.state import labs

needs_lab = pytest.mark.skipif(
    lab_unavailable() is not None and not os.environ.get("CI"), reason=f"{lab_unavailable()}; run as root on Linux"
)


@pytest.fixture(autouse=True)
def _no_lab_left() -> Iterator[None]:
    yield
    mine = [state.number for state in labs() if state.owner_pid == os.getpid()]
    assert not mine, f"labs left behind: {mine}"
