"""A `ByteSource` in memory, for tests that read many mutations of one file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardwise.errors import MalformedModelError


@dataclass(frozen=True)
class MemoryFile:
    is_remote: ClassVar[bool] = False
    data: bytes
    name: str = "memory.gguf"

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def read(self, offset_bytes: int, num_bytes: int) -> bytes:
        part = self.data[offset_bytes : offset_bytes + num_bytes]
        if len(part) != num_bytes:
            raise MalformedModelError("the file ends too early", where=self.name)
        return part
