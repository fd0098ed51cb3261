"""The one frozen, strict base of everything that goes to disk or over a wire."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgspec

from shardwise.errors import UsageError

T = TypeVar("T")


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen, keyword-only, and strict: an unknown field is an error."""


def to_json(record: Any, *, indent: int = 0) -> bytes:
    """Canonical JSON (sorted keys, no spaces) unless `indent` is given."""
    data = msgspec.json.encode(record, order="deterministic")
    return msgspec.json.format(data, indent=indent) if indent else data


def from_json(data: bytes | str, kind: type[T], *, where: str = "") -> T:
    """Read strict JSON; raises `UsageError` that names the field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"not a valid {kind.__name__}: {error}", where=where) from error


def digest(record: Any) -> str:
    """SHA-256 (hex) of the canonical JSON."""
    return hashlib.sha256(to_json(record)).hexdigest()


def plain(record: Any) -> Any:
    """Dicts, lists and scalars only."""
    return msgspec.to_builtins(record)
