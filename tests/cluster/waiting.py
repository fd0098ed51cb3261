"""Every wait has a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout_s: float = 20.0, what: str = "condition") -> T:
    """Poll until the condition is truthy; its value."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Whether no living process has this id (a zombie does not live)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
