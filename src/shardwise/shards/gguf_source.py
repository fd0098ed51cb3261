"""A GGUF model as slicing needs it: raw metadata entries and where each tensor's bytes lie.

In: the path of a `.gguf` file, or the first part of a split one. Out: `GgufSource`. Nothing is decoded that is not
asked for, and no weight is read. Fails when: a part is missing (`UsageError`), a file is not GGUF, is truncated or
has a header that lies (`MalformedModelError`).
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from shardwise.errors import MalformedModelError, UsageError

_PART_NAME = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


class SourceTensor:
    """One tensor: name, shape in ggml's order, type, and its bytes' place."""

    __slots__ = ("name", "num_bytes", "offset_bytes", "path", "shape", "type_id")

    def __init__(self, name: str, shape: tuple[int, ...], type_id: int, num_bytes: int, path: Path, offset_bytes: int):
        self.name = name
        self.shape = shape
        self.type_id = type_id
        self.num_bytes = num_bytes
        self.path = path
        self.offset_bytes = offset_bytes


class GgufSource:
    """All parts of one model."""

    def __init__(self, path: str | Path) -> None:
        self.paths = part_paths(Path(path))
        self.entries: dict[str, bytes] = {}  # raw key/value pairs in the file's order
        self.tensors: dict[str, SourceTensor] = {}
        self._fields: dict[str, Any] = {}
        digest = hashlib.sha256()
        for index, part in enumerate(self.paths):
            reader = _open(part)
            raw, fields = _raw_entries(reader)
            if index == 0:
                self.entries, self._fields = raw, fields
            digest.update(bytes(reader.data[: reader.data_offset]))
            self._add_tensors(reader, part)
        self.header_digest = digest.hexdigest()
        self.architecture = str(self.value("general.architecture", ""))

    def value(self, key: str, default: Any = None) -> Any:
        """A metadata value as plain Python, or `default`."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def value_type(self, key: str) -> gguf.GGUFValueType | None:
        """The element type of an array, or the type of a scalar."""
        field = self._fields.get(key)
        return None if field is None else field.types[-1]

    def is_array(self, key: str) -> bool:
        """Whether the key holds an array."""
        field = self._fields.get(key)
        return field is not None and field.types[0] == gguf.GGUFValueType.ARRAY

    def _add_tensors(self, reader: gguf.GGUFReader, part: Path) -> None:
        size = part.stat().st_size
        for item in reader.tensors:
            if item.data_offset + item.n_bytes > size:
                raise MalformedModelError(
                    f"'{item.name}' ends at byte {item.data_offset + item.n_bytes}, the file at {size}", where=str(part)
                )
            shape = tuple(int(n) for n in item.shape)
            self.tensors[item.name] = SourceTensor(
                item.name, shape, int(item.tensor_type), int(item.n_bytes), part, int(item.data_offset)
            )


def part_paths(path: Path) -> tuple[Path, ...]:
    """All parts of a model, in order; `UsageError` if one is missing."""
    if not path.is_file():
        raise UsageError("no such model file", where=str(path))
    match = _PART_NAME.match(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    parts = [path.with_name(f"{match['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise UsageError(f"{len(missing)} of {count} parts missing: {', '.join(missing[:3])}", where=str(path))
    return tuple(parts)


def _open(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError, UnicodeDecodeError) as error:
        raise MalformedModelError(f"not a readable GGUF file: {error}", where=str(path)) from error


def _raw_entries(reader: gguf.GGUFReader) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The bytes of each key/value pair: fields lie back to back, the first tensor's record ends the last one."""
    fields = [field for name, field in reader.fields.items() if not name.startswith("GGUF.")]
    ends = [field.offset for field in fields[1:]]
    ends.append(reader.tensors[0].field.offset if reader.tensors else _end_of(fields[-1]) if fields else 0)
    raw = {field.name: bytes(reader.data[field.offset : end]) for field, end in zip(fields, ends, strict=True)}
    return raw, {field.name: field for field in fields}


def _end_of(field: Any) -> int:
    return int(field.offset + sum(int(np.asarray(part).nbytes) for part in field.parts))
