"""The one frozen, strict base of everything that goes to disk or over a wire."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

import msgspec

from shardwise.errors import UsageError

T = TypeVar("T")


if TYPE_CHECKING:  # what msgspec cannot tell a type checker: frozen and keyword-only are inherited

    @dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(msgspec.field,))
    class Record:
        """Frozen, keyword-only, and strict: an unknown field is an error."""

        __struct_fields__: ClassVar[tuple[str, ...]]

        def __init_subclass__(
            cls, *, tag: str | None = None, tag_field: str = "", omit_defaults: bool = False, array_like: bool = False
        ) -> None: ...

else:

    class _KeywordOnly(type(msgspec.Struct)):
        """msgspec inherits every option but `kw_only`, so each class is told."""

        def __new__(mcls, name, bases, namespace, **options):
            return super().__new__(mcls, name, bases, namespace, **({"kw_only": True} | options))

    class Record(msgspec.Struct, metaclass=_KeywordOnly, frozen=True, forbid_unknown_fields=True):
        """Frozen, keyword-only, and strict: an unknown field is an error."""


R = TypeVar("R", bound="Record")


def replace(record: R, **changes: Any) -> R:
    """A copy with some fields changed."""
    return msgspec.structs.replace(record, **changes)  # type: ignore[type-var]


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
