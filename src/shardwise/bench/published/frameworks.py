"""Which program made a row, and what that program costs beside arithmetic: `frameworks.toml`. Nothing fails."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from shardwise.bench.published.rows import Row
from shardwise.records import Record


class Framework(Record):
    """One program's constants; see the data file."""

    name: str
    words: tuple[str, ...]
    kernels: str
    hop_s: float
    hop_bytes: float
    local_hop_s: float
    sync_s: float
    launch_s: float
    request_s: float
    batch: int
    overlap: bool


@cache
def data(file: str) -> dict[str, Any]:
    """A data file of this package."""
    return tomllib.loads(files(__package__).joinpath(file).read_text("utf-8"))


@cache
def frameworks() -> tuple[Framework, ...]:
    """All, in the order in which they are tried."""
    entries = data("frameworks.toml").items()
    return tuple(msgspec.convert(entry | {"name": name}, Framework) for name, entry in entries)


def framework_of(row: Row) -> Framework:
    """By the strategy's words first, then by the source's."""
    for text in (row.strategy, f"{row.quantization} {row.source}".lower()):
        for found in frameworks():
            if any(word in text for word in found.words if not (text != row.strategy and word in ("single", "rpc"))):
                return found
    return frameworks()[-1]
