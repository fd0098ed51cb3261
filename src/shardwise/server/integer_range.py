"""Decimal integers between two bounds as a GBNF expression.

Digits are decided from the left: below a bound's digit the rest is free, at the digit the rest is bound again. The size is
proportional to the square of the number of digits.
"""

from __future__ import annotations

_DIGITS = 18


def integer_rule(low: int | None, high: int | None) -> str:
    """Every integer in [low, high]; an open side reaches 18 digits. Needs low <= high where both are given."""
    least = -(10**_DIGITS) + 1 if low is None else low
    most = 10**_DIGITS - 1 if high is None else high
    options = []
    if least < 0:
        top = max(1, -most if most < 0 else 1)
        options.append(f'"-" ({_naturals(top, -least)})')
    if most >= 0:
        options.append(_naturals(max(0, least), most))
    return " | ".join(options)


def _naturals(low: int, high: int) -> str:
    """Numbers of [low, high], 0 <= low <= high, by their number of digits."""
    options = []
    for length in range(len(str(low)), len(str(high)) + 1):
        smallest = 0 if length == 1 else 10 ** (length - 1)
        first, last = max(low, smallest), min(high, 10**length - 1)
        if first <= last:
            options.append(_same_length(str(first), str(last)))
    return " | ".join(options)


def _same_length(low: str, high: str) -> str:
    if low == high:
        return f'"{low}"'
    if set(low) == {"0"} and set(high) == {"9"}:
        return _free(len(low))
    if len(low) == 1:
        return f"[{low}-{high}]"
    head_low, head_high, rest = low[0], high[0], len(low) - 1
    if head_low == head_high:
        return f'"{head_low}" ({_same_length(low[1:], high[1:])})'
    options = []
    inner_low, inner_high = int(head_low), int(head_high)
    if set(low[1:]) != {"0"}:
        options.append(f'"{head_low}" ({_same_length(low[1:], "9" * rest)})')
        inner_low += 1
    upper = ""
    if set(high[1:]) != {"9"}:
        upper = f'"{head_high}" ({_same_length("0" * rest, high[1:])})'
        inner_high -= 1
    if inner_low <= inner_high:
        options.append(f"[{inner_low}-{inner_high}] {_free(rest)}")
    return " | ".join([*options, upper] if upper else options)


def _free(count: int) -> str:
    return "[0-9]" if count == 1 else f"[0-9]{{{count}}}"
