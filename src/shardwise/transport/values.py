"""What values in a received message may be. The codec has checked types; each receiver checks values with these. Pure.

**Fails with** `UsageError` that names the field. **Called by** `stage.sensible` and `session.plausible`.
"""

from __future__ import annotations

import math

from shardwise.errors import UsageError

MAX_ID = 2**63 - 1  # of sessions, epochs; and of counts in bytes
MAX_INT = 2**31 - 1  # what llama.cpp counts with


def require_within(name: str, value: int, low: int, high: int) -> None:
    """`low` and `high` are allowed."""
    if not low <= value <= high:
        raise UsageError(f"{name} = {value} in a message", where=name, hint=f"{low} to {high}")


def require_finite(name: str, value: float) -> None:
    """No infinity, and nothing that is not a number."""
    if not math.isfinite(value):
        raise UsageError(f"{name} = {value} in a message", where=name, hint="a finite number")
