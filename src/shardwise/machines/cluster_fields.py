"""Reading single fields of a cluster file: with units, with the line in every complaint.

In: a table of the parsed file and where it stands. Out: values in SI base units, `Measurement`s with their companions
(`memory_bandwidth_measured = {spread, n, method, when}`). Fails with `UsageError` that names line, field, value and what
is allowed.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from shardwise.errors import UsageError
from shardwise.machines.cluster_lines import LineIndex, Path
from shardwise.machines.profile import Measurement
from shardwise.units import parse_bytes, parse_compute, parse_duration, parse_rate

MEASURED = "_measured"
_NO_VALUE = object()


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the file: its values, where it stands, and what to call it."""

    values: dict[str, Any]
    path: Path
    label: str
    file: str
    index: LineIndex

    def fail(self, message: str, *, field: str = "", value: object = _NO_VALUE, hint: str = "") -> NoReturn:
        """Raise the one error of this room."""
        line = self.index.line((*self.path, field) if field else self.path)
        details: dict[str, Any] = {"line": line, "field": field}
        if value is not _NO_VALUE:
            details["value"] = value if isinstance(value, str | int | float | bool) else str(value)
        raise UsageError(f"{self.label}: {message}", where=f"{self.file} line {line}", hint=hint, **details)

    def check_fields(self, allowed: Iterable[str], measured: Iterable[str] = ()) -> None:
        """Refuse fields that nobody reads, with the nearest name."""
        known = [*allowed, *(f"{name}{MEASURED}" for name in measured)]
        for key, value in self.values.items():
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean '{near[0]}'?" if near else f"allowed: {', '.join(allowed)}"
                self.fail(f"unknown field '{key}'", field=key, value=value, hint=hint)

    def require(self, field: str, example: str) -> Any:
        """The value of a field that must be there."""
        if field not in self.values:
            self.fail(f"'{field}' is missing", field=field, hint=f"add {field} = {example}")
        return self.values[field]

    def text(self, field: str, default: str | None = None, *, example: str = '"..."') -> str:
        """A non-empty string."""
        value = self.values.get(field, default) if default is not None else self.require(field, example)
        if not isinstance(value, str) or (not value.strip() and default is None):
            self.fail(f"{field} = {value!r} is not a name", field=field, value=value, hint=f"write {field} = {example}")
        return value

    def choice(self, field: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """One of a few words."""
        value = self.text(field, default, example=f'"{allowed[0]}"')
        if value not in allowed:
            near = difflib.get_close_matches(value, allowed, n=1)
            hint = (f"did you mean '{near[0]}'? " if near else "") + f"allowed: {', '.join(allowed)}"
            self.fail(f"{field} = {value!r} is unknown", field=field, value=value, hint=hint)
        return value

    def number(self, field: str, default: float, low: float, high: float) -> float:
        """A plain number with low < value <= high."""
        value = self.values.get(field, default)
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or not low < value <= high:
            self.fail(
                f"{field} = {value!r} is not allowed",
                field=field,
                value=value,
                hint=f"write a number above {low:g}, at most {high:g}",
            )
        return float(value)

    def count(self, field: str, default: int = 0) -> int:
        """A whole number >= 0."""
        value = self.values.get(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            self.fail(f"{field} = {value!r} is not a count", field=field, value=value, hint="write a whole number, 0 or more")
        return value

    def _parsed(self, field: str, example: str, parse: Callable[..., float], *, zero: bool) -> float:
        raw = self.require(field, example)
        try:
            value = parse(raw, field=field)
        except UsageError as error:
            self.fail(error.message, field=field, value=raw, hint=error.hint)
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            self.fail(f"{field} = {raw!r} must be above zero", field=field, value=raw, hint=f"write {field} = {example}")
        return value

    def num_bytes(self, field: str) -> int:
        """A size in bytes, above zero."""
        return int(self._parsed(field, '"16 GiB"', parse_bytes, zero=False))

    def rate(self, field: str, example: str = '"60 GB/s"') -> Measurement:
        """Bytes per second, above zero."""
        return self._measured(field, self._parsed(field, example, parse_rate, zero=False), parse_rate)

    def compute(self, field: str) -> Measurement:
        """FLOP/s, above zero."""
        return self._measured(field, self._parsed(field, '"1.2 TFLOP/s"', parse_compute, zero=False), parse_compute)

    def duration(self, field: str) -> Measurement:
        """Seconds, zero allowed."""
        return self._measured(field, self._parsed(field, '"0.3 ms"', parse_duration, zero=True), parse_duration)

    def optional(self, field: str, read: Callable[[str], Measurement]) -> Measurement | None:
        """`read(field)` where the field is there."""
        return read(field) if field in self.values else None

    def _measured(self, field: str, value: float, parse: Callable[..., float]) -> Measurement:
        """Add what stands in the companion field, if there is one."""
        name = f"{field}{MEASURED}"
        if name not in self.values:
            return Measurement(value=value)
        beside = self.values[name]
        if not isinstance(beside, dict):
            self.fail(
                f"{name} is not a table",
                field=name,
                value=beside,
                hint='write {spread = "...", n = 20, method = "...", when = "..."}',
            )
        table = Table(beside, (*self.path, name), f"{self.label}, {name}", self.file, self.index)
        table.check_fields(("spread", "n", "method", "when"))
        spread = 0.0
        if "spread" in beside:
            spread = table._parsed("spread", '"0.1 ms"', parse, zero=True)
        return Measurement(
            value=value, spread=spread, n=table.count("n"), method=table.text("method", ""), when=table.text("when", "")
        )

    def tables(self, field: str, label: Callable[[int, dict[str, Any]], str]) -> list[Table]:
        """An array of tables."""
        items = self.values.get(field, [])
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            self.fail(f"'{field}' must be an array of tables", field=field, hint=f"write [[{field}]]")
        return [Table(item, (*self.path, field, i), label(i, item), self.file, self.index) for i, item in enumerate(items)]
