"""The named access links of `link_profiles.toml`, each with where its figures come from."""

from __future__ import annotations

import difflib
import tomllib
from functools import cache
from importlib import resources
from typing import Any

from shardwise.errors import UsageError
from shardwise.records import Record
from shardwise.transport.shaping import LinkShape
from shardwise.units import parse_bytes, parse_duration, parse_rate


class LinkPreset(Record):
    """A named access link. `kind` is what a `LinkProfile` calls it."""

    name: str
    title: str
    kind: str
    up: LinkShape
    down: LinkShape
    source: str


_DURATIONS = {"delay": "delay_s", "jitter": "jitter_s", "doze_after": "doze_after_s", "doze_period": "doze_period_s"}
_PLAIN = {"jitter_kind", "jitter_sigma", "loss", "loss_burst_packets"}


def shape_from_toml(table: dict[str, Any], *, where: str) -> LinkShape:
    """A `LinkShape` from a TOML table with units; unknown keys are errors."""
    fields: dict[str, Any] = {}
    for key, value in table.items():
        if key == "rate":
            fields["bytes_per_s"] = parse_rate(value, field=f"{where}.rate")
        elif key == "queue":
            fields["queue_bytes"] = parse_bytes(value, field=f"{where}.queue")
        elif key in _DURATIONS:
            fields[_DURATIONS[key]] = parse_duration(value, field=f"{where}.{key}")
        elif key in _PLAIN:
            fields[key] = value
        else:
            allowed = sorted({"rate", "queue", *_DURATIONS, *_PLAIN})
            raise UsageError(f"unknown key {key!r}", where=where, hint=f"one of {', '.join(allowed)}", field=key)
    if fields.get("jitter_s") and "jitter_kind" not in fields:
        fields["jitter_kind"] = "exponential"
    return LinkShape(**fields)


@cache
def link_presets() -> dict[str, LinkPreset]:
    """All named access links, by name."""
    text = resources.files("shardwise.bench.lab").joinpath("link_profiles.toml").read_text(encoding="utf-8")
    presets = {}
    for name, table in tomllib.loads(text).items():
        both = table.get("both", {})
        presets[name] = LinkPreset(
            name=name,
            title=table["title"],
            kind=table["kind"],
            up=shape_from_toml(both | table.get("up", {}), where=f"{name}.up"),
            down=shape_from_toml(both | table.get("down", {}), where=f"{name}.down"),
            source=table["source"],
        )
    return presets


def link_preset(name: str) -> LinkPreset:
    """One named access link; a misspelt name is a `UsageError` with the nearest one."""
    presets = link_presets()
    if name not in presets:
        near = difflib.get_close_matches(name, presets, n=1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(presets)}"
        raise UsageError(f"unknown link profile {name!r}", where="lab", hint=hint, field="profile")
    return presets[name]
