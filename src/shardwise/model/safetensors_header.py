"""Bytes of a safetensors file -> where each tensor lies, from its header alone.

The format is 8 bytes of length, that much JSON, then data (github.com/huggingface/safetensors, "Format"). Everything
the header claims is checked against the file; a lie is a `MalformedModelError`, an unknown dtype an
`UnsupportedModelError`. Shapes are in the file's order, `(out, in)`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shardwise.errors import MalformedModelError, UnsupportedModelError
from shardwise.model.byte_source import ByteSource
from shardwise.model.model_files import parse_object
from shardwise.model.quantization import HUGGING_FACE, quantizations

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_DIMS = 16
DTYPES = frozenset(HUGGING_FACE) | {"F32", "F16", "BF16"}


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """One tensor; `offset_bytes` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """A checked header."""

    source: ByteSource
    tensors: tuple[SafeTensor, ...]
    data_offset_bytes: int


def read_safetensors_header(source: ByteSource) -> SafetensorsHeader:
    """Read and check one file's header."""
    if source.size_bytes < 8:
        raise MalformedModelError(f"a file of {source.size_bytes} bytes is no safetensors file", where=source.name)
    (length,) = struct.unpack("<Q", source.read(0, 8))
    if length > MAX_HEADER_BYTES or 8 + length > source.size_bytes:
        message = f"the header claims {length} bytes of a file of {source.size_bytes}"
        raise MalformedModelError(message, where=source.name, hint="it is cut off or no safetensors file")
    entries = parse_object(source.read(8, length), source.name)
    data_offset = 8 + length
    tensors = [_tensor(source, data_offset, name, e) for name, e in entries.items() if name != "__metadata__"]
    ordered = sorted(tensors, key=lambda t: (t.offset_bytes, t.num_bytes))
    for before, after in pairwise(ordered):
        if before.offset_bytes + before.num_bytes > after.offset_bytes:
            raise MalformedModelError(f"the tensors {before.name[:200]!r} and {after.name[:200]!r} overlap", where=source.name)
    return SafetensorsHeader(source, tuple(tensors), data_offset)


def _tensor(source: ByteSource, data_offset: int, name: str, entry: Any) -> SafeTensor:
    dtype, shape, offsets = _fields(source, name, entry)
    kind = quantizations().get(dtype)
    if kind is None or dtype not in DTYPES:
        raise UnsupportedModelError(f"tensor {name[:200]!r} has the unknown dtype '{dtype[:50]}'", where=source.name)
    count = 1
    for size in shape:
        count *= size
    start, end = offsets
    if end - start != -(-count * kind.block_bytes // kind.block_elements):
        message = f"tensor {name[:200]!r} of shape {shape[:9]} and dtype {dtype} claims {end - start} bytes"
        raise MalformedModelError(message, where=source.name)
    if data_offset + end > source.size_bytes:
        message = f"the file has {source.size_bytes} bytes, but tensor {name[:200]!r} ends at byte {data_offset + end}"
        raise MalformedModelError(message, where=source.name, hint="it is not complete: download it again")
    return SafeTensor(name, tuple(shape), dtype, data_offset + start, end - start)


def _fields(source: ByteSource, name: str, entry: Any) -> tuple[str, list[int], tuple[int, int]]:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        valid = isinstance(dtype, str) and isinstance(shape, list) and len(shape) <= MAX_DIMS
        valid = valid and all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 48 for n in [*shape, start, end])
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid or start > end:
        raise MalformedModelError(f"the header's entry for tensor {name[:200]!r} makes no sense", where=source.name)
    return dtype, shape, (start, end)
