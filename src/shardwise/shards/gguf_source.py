"""A GGUF model as slicing needs it: raw metadata entries and where each tensor's bytes lie.

In: the path of a `.gguf` file, or the first part of a split one. Out: `GgufSource`. Nothing is decoded that is not
asked for, and no weight is read. Fails when: a file or a part is missing (`ModelError`), a file is not GGUF, is
truncated or has a header that lies (`MalformedModelError`, from `model.gguf_header`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import MalformedModelError
from shardwise.model.gguf_header import GgufArray, GgufHeader, GgufType, Scalar, read_gguf_header
from shardwise.model.split_files import check_parts, part_paths
from shardwise.shards.gguf_writer import encode_raw


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor: name, shape in ggml's order, type, and its bytes' place."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    num_bytes: int
    path: Path
    offset_bytes: int  # absolute


class GgufSource:
    """All parts of one model; metadata is the first part's."""

    def __init__(self, path: str | Path) -> None:
        self.paths = tuple(part_paths(path))
        self.headers = headers = [read_gguf_header(part) for part in self.paths]
        check_parts(headers)
        self.header: GgufHeader = headers[0]
        self.tensors: dict[str, SourceTensor] = {}
        digest = hashlib.sha256()
        for part, header in zip(self.paths, headers, strict=True):
            digest.update(header.source.read(0, header.data_offset_bytes if header.tensors else header.file_bytes))
            self._add_tensors(part, header)
        self.header_digest = digest.hexdigest()
        self.architecture = self.header.text("general.architecture")

    def _add_tensors(self, part: Path, header: GgufHeader) -> None:
        for t in header.tensors:
            if t.name in self.tensors:
                raise MalformedModelError(f"tensor '{t.name}' is in two parts", where=str(part))
            self.tensors[t.name] = SourceTensor(t.name, t.shape, t.type_id, t.num_bytes, part, t.offset_bytes)

    @property
    def keys(self) -> list[str]:
        """Metadata keys in the file's order."""
        return list(self.header.metadata)

    def entry(self, key: str) -> bytes:
        """One key/value pair as it stands in the file."""
        return encode_raw(key, self.header.metadata[key].type, self.header.raw(key))

    def element_type(self, key: str) -> GgufType | None:
        """The element type of an array; None where the key is missing or a scalar."""
        entry = self.header.metadata.get(key)
        return entry.value.element_type if entry is not None and isinstance(entry.value, GgufArray) else None

    def array(self, key: str) -> list[Scalar]:
        """The elements of an array."""
        return self.header.array(key)

    def own_key(self, name: str) -> str:
        """`block_count` -> `llama.block_count`."""
        return f"{self.architecture}.{name}"

    def has(self, name: str) -> bool:
        """Whether the architecture's key is there."""
        return self.own_key(name) in self.header.metadata

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer of the architecture; `MalformedModelError` where it is missing or none."""
        return self.header.integer(self.own_key(name), default)
