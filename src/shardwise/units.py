"""Parsing and printing of bytes, rates, durations; nothing else.

Inside the program every quantity is in SI base units (bytes, seconds, FLOP/s, bytes/s). Text with units exists only
at the edge. Binary prefixes (KiB, MiB, GiB, TiB) and decimal ones (KB, MB, GB, TB) mean what they say; bits are
written `bit` (`1 Gbit/s` is 125,000,000 bytes/s).
"""

from __future__ import annotations

import math
import re

from shardwise.errors import UsageError

_NUMBER = re.compile(r"^\s*([+-]?(?:\d[\d_,]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-zµμ/]*)\s*$")
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_BYTES = {f"{p}b": f for p, f in (_DECIMAL | _BINARY).items()}
_BITS = {f"{p}bit": f / 8 for p, f in (_DECIMAL | _BINARY).items()}
_RATES = (
    {f"{unit}/s": f for unit, f in (_BYTES | _BITS).items()}
    | {f"{p}bps": f / 8 for p, f in _DECIMAL.items()}
    | {f"{p}bit/sec": f / 8 for p, f in _DECIMAL.items()}
)
_DURATIONS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_COMPUTE = {f"{p}{unit}": f for p, f in _DECIMAL.items() for unit in ("flop/s", "flops", "op/s", "ops")}


def _parse(text: object, table: dict[str, float], kind: str, example: str, field: str) -> float:
    allowed = f"write a {kind} such as '{example}'"
    if not isinstance(text, str):
        raise UsageError(f"{field or kind} = {text!r} has no unit", hint=allowed, field=field)
    match = _NUMBER.match(text)
    if match is None:
        raise UsageError(f"{field or kind} = {text!r} is not a {kind}", hint=allowed, field=field)
    value, unit = float(match.group(1).replace(",", "").replace("_", "")), match.group(2).lower()
    if unit not in table:
        what = "has no unit" if not unit else f"has the unknown unit '{match.group(2)}'"
        raise UsageError(f"{field or kind} = {text!r} {what}", hint=allowed, field=field)
    result = value * table[unit]
    if not math.isfinite(result) or result < 0:
        raise UsageError(f"{field or kind} = {text!r} is not a finite, non-negative {kind}", hint=allowed, field=field)
    return result


def parse_bytes(text: object, *, field: str = "") -> int:
    """`16 GiB`, `94 MB`, `512b` -> bytes."""
    return round(_parse(text, dict(_BYTES), "size", "16 GiB", field))


def parse_rate(text: object, *, field: str = "") -> float:
    """`1 Gbit/s`, `60 GB/s` -> bytes per second."""
    return _parse(text, dict(_RATES), "rate", "1 Gbit/s", field)


def parse_duration(text: object, *, field: str = "") -> float:
    """`0.3 ms`, `2 s` -> seconds."""
    return _parse(text, dict(_DURATIONS), "duration", "0.3 ms", field)


def parse_compute(text: object, *, field: str = "") -> float:
    """`1.2 TFLOP/s` -> floating-point operations per second."""
    return _parse(text, dict(_COMPUTE), "compute rate", "1.2 TFLOP/s", field)


def _scaled(value: float, base: float, prefixes: tuple[str, ...]) -> tuple[float, str]:
    index = 0
    while abs(value) >= base * 0.9995 and index < len(prefixes) - 1:
        value /= base
        index += 1
    return value, prefixes[index]


def _digits(value: float) -> str:
    magnitude = abs(value)
    return (
        f"{value:.0f}" if magnitude >= 99.95 or value == int(value) else f"{value:.1f}" if magnitude >= 9.995 else f"{value:.2f}"
    )


def format_bytes(value: float) -> str:
    """Bytes -> `1.50 GiB`."""
    scaled, prefix = _scaled(float(value), 1024.0, ("", "Ki", "Mi", "Gi", "Ti", "Pi"))
    return f"{_digits(scaled)} {prefix}B"


def format_rate(bytes_per_s: float, *, bits: bool = False) -> str:
    """Bytes per second -> `60 GB/s`, or `1 Gbit/s` with `bits`."""
    scaled, prefix = _scaled(bytes_per_s * (8 if bits else 1), 1000.0, ("", "k", "M", "G", "T"))
    return f"{_digits(scaled)} {prefix}{'bit' if bits else 'B'}/s"


def format_compute(flops: float) -> str:
    """FLOP/s -> `1.20 TFLOP/s`."""
    scaled, prefix = _scaled(flops, 1000.0, ("", "k", "M", "G", "T", "P"))
    return f"{_digits(scaled)} {prefix}FLOP/s"


def format_duration(seconds: float) -> str:
    """Seconds -> `0.30 ms`, `2.10 s`, `3 min 20 s`."""
    magnitude = abs(seconds)
    if magnitude >= 120:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    if magnitude >= 1:
        return f"{_digits(seconds)} s"
    if magnitude >= 1e-3:
        return f"{_digits(seconds * 1e3)} ms"
    return f"{_digits(seconds * 1e6)} µs"
