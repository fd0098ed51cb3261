"""Vendors' figures of known processors, found by the names that people write: `RTX 3090 24GB`, `M3 Ultra`, `Raspberry Pi 5`.

Data: `devices.toml`. Nothing fails: an unknown name is None.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache, lru_cache
from importlib.resources import files

from shardwise.records import Record

_GB, _TERA = 1e9, 1e12


class DeviceSpec(Record):
    """One processor as its vendor describes it."""

    name: str  # what matched
    kind: str  # cuda | metal | vulkan | cpu
    device_class: str  # what reaches a similar share of its figures
    memory_bytes: float
    memory_bytes_per_s: float
    flops_per_s: float


@cache
def known_devices() -> tuple[tuple[frozenset[str], DeviceSpec], ...]:
    """(words of a name, figures), longer names first."""
    data = tomllib.loads(files(__package__).joinpath("devices.toml").read_text("utf-8"))
    out = []
    for entry in data["device"]:
        names = entry["match"].split("|")
        for name in names:
            spec = DeviceSpec(
                name=names[0],
                kind=entry["kind"],
                device_class=entry["class"],
                memory_bytes=entry["memory"] * _GB,
                memory_bytes_per_s=entry["bandwidth"] * _GB,
                flops_per_s=entry["compute"] * _TERA,
            )
            out.append((_words(name), spec))
    return tuple(out)


@lru_cache(maxsize=1024)
def find_device(name: str) -> DeviceSpec | None:
    """The processor that `name` means; an accelerator counts before the CPU beside it."""
    words = _words(name)
    return next((spec for needed, spec in known_devices() if needed <= words), None)


def _words(name: str) -> frozenset[str]:
    """`RTX3090-24GB` -> {rtx, 3090, 24gb}."""
    text = re.sub(r"\b(rtx|gtx|tesla|radeon|rx)(?=\d)", r"\1 ", name.lower())
    text = re.sub(r"(?<=\d)(ti|super)\b", r" \1", text)
    return frozenset(part for part in re.split(r"[^a-z0-9.]+", text) if part)
