"""One published measurement, whatever the file calls it: JSON flows in, `Row`s come out.

Promises: a file that is JSON gives one `Row` an entry, in order; a field that is missing or odd is None and never an
error. Fails with `UsageError` when the file cannot be read or holds no list of rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.bench.published.values import integer, number, scaled, text, within
from shardwise.errors import UsageError

# What a device or link can have; anything else is a typing error and counts as not stated.
_MEMORY, _RATE, _FLOPS = (1e7, 1e15), (1e7, 1e15), (1e8, 1e19)
_BITS, _LATENCY = (1e4, 1e14), (1e-8, 60.0)
_LISTS = ("rows", "results", "measurements", "data")


@dataclass(frozen=True, slots=True)
class Machines:
    """`count` equal machines (or GPUs) as the source describes them; None = not stated."""

    device: str
    count: int
    memory_bytes: float | None
    memory_bytes_per_s: float | None
    flops_per_s: float | None
    vram_bytes: float | None
    disk_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class Wires:
    """The links between them."""

    kind: str
    bytes_per_s: float | None
    latency_s: float | None  # one way


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement."""

    id: Any
    source: str
    model: str
    quantization: str
    machines: tuple[Machines, ...]
    wires: Wires | None
    strategy: str
    metric: str
    value: float | None
    unit: str
    batch: int
    context: str
    mode: str
    notes: str
    measured: bool
    num_params: float | None
    layers: tuple[tuple[int, int], ...] = ()  # stated by the source, one range a machine

    @property
    def num_machines(self) -> int:
        return sum(m.count for m in self.machines)

    @property
    def is_single(self) -> bool:
        """One device, nothing on a network: what devices are calibrated on."""
        wired = self.wires is not None and "offload" not in self.wires.kind
        return self.num_machines == 1 and not wired and "rpc" not in self.strategy


def load_rows(path: Path) -> list[Row]:
    """All rows of a file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read published rows: {error}", where=str(path), hint="a JSON list of rows") from error
    found = document
    if isinstance(document, dict):
        found = next((document[name] for name in _LISTS if isinstance(document.get(name), list)), None)
    if not isinstance(found, list):
        raise UsageError("no list of rows", where=str(path), hint=f"a list, or an object with {' | '.join(_LISTS)}")
    return [read_row(entry, index) for index, entry in enumerate(found)]


def read_row(entry: Any, index: int = 0) -> Row:
    """One entry; anything that is no object gives an empty row."""
    data: dict[str, Any] = entry if isinstance(entry, dict) else {}
    nodes = data.get("nodes")
    groups = nodes if isinstance(nodes, list) else [nodes] if isinstance(nodes, dict) else []
    return Row(
        id=data.get("id", index),
        source=text(data.get("source")),
        model=text(data.get("model")),
        quantization=text(data.get("quant") or data.get("quantization")),
        machines=tuple(_machines(group) for group in groups if isinstance(group, dict | str)),
        wires=_wires(data.get("links")),
        strategy=text(data.get("strategy")).lower(),
        metric=text(data.get("metric")).lower(),
        value=number(data.get("value")),
        unit=text(data.get("unit")),
        batch=integer(data.get("batch"), 1),
        context=text(data.get("context")).lower(),
        mode=text(data.get("mode")).lower(),
        notes=text(data.get("notes")),
        measured=data.get("measured") is not False,
        num_params=number(data.get("params")),
        layers=_ranges(data.get("layer_ranges_half_open")),
    )


def _machines(group: dict[str, Any] | str) -> Machines:
    data = group if isinstance(group, dict) else {"device": group}
    return Machines(
        device=text(data.get("device") or data.get("name")),
        count=integer(data.get("count"), 1),
        memory_bytes=within(scaled(data.get("mem_gb"), 1e9), *_MEMORY),
        memory_bytes_per_s=within(scaled(data.get("mem_bw_gbs"), 1e9), *_RATE),
        flops_per_s=within(scaled(data.get("flops"), 1.0), *_FLOPS),
        vram_bytes=within(scaled(data.get("vram_gb"), 1e9), *_MEMORY),
        disk_bytes_per_s=within(scaled(data.get("disk_gbs"), 1e9), *_RATE),
    )


def _wires(links: Any) -> Wires | None:
    if isinstance(links, list):
        links = links[0] if links else None
    if isinstance(links, str):
        links = {"type": links}
    if not isinstance(links, dict):
        return None
    latency = within(scaled(links.get("latency_ms"), 1e-3), *_LATENCY)
    round_trip = within(scaled(links.get("rtt_ms"), 1e-3), *_LATENCY)
    rate = within(scaled(links.get("bandwidth_gbps"), 1e9), *_BITS)
    return Wires(
        kind=text(links.get("type")).lower(),
        bytes_per_s=rate / 8 if rate else None,
        latency_s=latency if latency is not None else round_trip / 2 if round_trip is not None else None,
    )


def _ranges(value: Any) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, dict):
        return ()
    pairs = [pair for pair in value.values() if isinstance(pair, list) and len(pair) == 2]
    whole = [(int(a), int(b)) for a, b in pairs if isinstance(a, int) and isinstance(b, int) and 0 <= a < b]
    return tuple(sorted(whole))
