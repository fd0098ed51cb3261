"""A set of files that make up one model, wherever they lie: `LocalFolder` here, `hub.RemoteRepo` behind a server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardwise.errors import MalformedModelError, ModelError
from shardwise.model.byte_source import ByteSource, LocalFile

MAX_JSON_BYTES = 64 << 20  # tokenizer.json of the largest vocabularies has 35 MB


class ModelFiles(Protocol):
    """Files by their names relative to the model's root."""

    @property
    def label(self) -> str:
        """What error messages call the model."""

    def names(self) -> list[str]:
        """All files, sorted."""

    def open_all(self, names: list[str]) -> list[ByteSource]:
        """Sources of several files; `ModelError` where one does not exist."""


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A folder on this machine; files below its first level do not belong to the model."""

    path: Path

    @property
    def label(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        try:
            return sorted(entry.name for entry in self.path.iterdir() if entry.is_file())
        except OSError as error:
            raise ModelError(f"cannot read the model's folder: {error.strerror}", where=str(self.path)) from error

    def open_all(self, names: list[str]) -> list[ByteSource]:
        return [LocalFile.open(self.path / name) for name in names]


def read_text(source: ByteSource) -> bytes:
    """A whole small file."""
    if source.size_bytes > MAX_JSON_BYTES:
        raise MalformedModelError(f"the file has {source.size_bytes} bytes, which no such file has", where=source.name)
    return source.read(0, source.size_bytes)


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object; `MalformedModelError` for anything else."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MalformedModelError(f"this is no JSON: {str(error)[:100]}", where=where) from error
    if not isinstance(value, dict):
        raise MalformedModelError("this is no JSON object", where=where)
    return value
