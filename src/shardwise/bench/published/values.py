"""Numbers out of whatever people write: `1.0`, `"1 Gbit/s"`, `"<5"`, `"0.1-1.0"`, `{"in_region": 10}`. Nothing here fails.

A bound counts as half of it, a range as its geometric mean, a table as its smallest value; no number is None.
"""

from __future__ import annotations

import math
import re
from typing import Any

_NUMBER = re.compile(r"(?<![\w.])(\d+(?:[.,]\d+)?(?:e[+-]?\d+)?)", re.I)
_SCALE = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def number(value: Any) -> float | None:
    """A finite number that is not negative, or None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if math.isfinite(value) and value >= 0 else None
    if isinstance(value, dict):
        found = [n for n in map(number, value.values()) if n is not None]
        return min(found, default=None)
    if not isinstance(value, str):
        return None
    found = [float(text.replace(",", ".")) for text in _NUMBER.findall(value)]
    if not found:
        return None
    if value.strip().startswith("<"):
        return found[0] / 2
    if len(found) == 2 and re.search(r"\d\s*(?:-|to|\u2013)\s*\d", value) and min(found) > 0:
        return math.sqrt(found[0] * found[1])
    return found[0]


def scaled(value: Any, unit: float) -> float | None:
    """`value` times `unit`, but text with a prefix of its own (`"800 Mbit/s"` where Gbit/s is meant) keeps that."""
    found = number(value)
    if found is None or found == 0:
        return None
    if isinstance(value, str) and (match := re.search(r"\d\s*([kmgt])(?:i?b|bit|flop)", value.lower())):
        return found * _SCALE[match[1]]
    return found * unit


def within(value: float | None, low: float, high: float) -> float | None:
    """The value, or None beyond what such a thing can be: a typing error says nothing."""
    return value if value is not None and low <= value <= high else None


def integer(value: Any, default: int) -> int:
    """A count of at least 1."""
    found = number(value)
    return max(1, round(found)) if found else default


def text(value: Any) -> str:
    """The text, or nothing."""
    return value if isinstance(value, str) else "" if value is None else str(value)
