"""Fixtures of the bench room."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from shardwise.bench.lab.state import labs


@pytest.fixture(autouse=True)
def _no_lab_left() -> Iterator[None]:
    yield
    mine = [state.number for state in labs() if state.owner_pid == os.getpid()]
    assert not mine, f"labs left behind: {mine}"
