"""Bytes of a GGUF file -> its header: metadata and where each tensor lies. No weight is read.

The whole text of a header (a vocabulary of 260,000 tokens with its merges is about 15 MB) is walked once, but arrays
stay where they are: a `GgufArray` is a span of the file that `GgufHeader.array` decodes when somebody asks.
Everything that a header claims is checked against the file before it is believed; a lie, a truncation or a key that is
missing is a `MalformedModelError` of one line, a version, byte order or tensor type that nobody can compute an
`UnsupportedModelError`. Format: ggml's docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise
from pathlib import Path

from shardwise.errors import MalformedModelError, UnsupportedModelError
from shardwise.model.byte_source import ByteSource, LocalFile
from shardwise.model.quantization import ggml_types, tensor_bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 96 << 20  # the largest vocabularies need 20 MiB; a header of zeros must not fill the memory
MAX_ENTRIES = 1 << 18  # metadata keys, tensors
MAX_ARRAY_ELEMENTS = 1 << 24  # the largest known array has 500,000 merges
MAX_NAME_BYTES = 1 << 16  # gguf.md: keys are at most 2^16 - 1 bytes
MAX_DIMS = 4
MAX_KNOWN = 8  # files whose headers are remembered
MAX_INTEGER = 1 << 48  # of a size or count that somebody computes with


class GgufType(IntEnum):
    """Types of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


FORMATS = {
    GgufType.UINT8: "B",
    GgufType.INT8: "b",
    GgufType.UINT16: "H",
    GgufType.INT16: "h",
    GgufType.UINT32: "I",
    GgufType.INT32: "i",
    GgufType.FLOAT32: "f",
    GgufType.BOOL: "?",
    GgufType.UINT64: "Q",
    GgufType.INT64: "q",
    GgufType.FLOAT64: "d",
}
Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array that has not been decoded: where its elements lie in the file."""

    element_type: GgufType
    num_elements: int
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufValue:
    """One metadata value; `offset_bytes` and `num_bytes` are its raw span, without key and type."""

    type: GgufType
    value: Scalar | GgufArray
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: ggml's shape (fastest first), and where its bytes lie (`offset_bytes` counts from the file's start)."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    quantization: str
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A checked header. `source` is kept to decode arrays later; tensors are in the order of the file."""

    source: ByteSource
    version: int
    alignment_bytes: int
    metadata: dict[str, GgufValue] = field(repr=False)
    tensors: tuple[GgufTensor, ...] = field(repr=False)
    data_offset_bytes: int

    @property
    def file_bytes(self) -> int:
        return self.source.size_bytes

    def raw(self, key: str) -> bytes:
        """The bytes of a value as they stand in the file (for an array: type, count and elements)."""
        value = self.metadata[key]
        return self.source.read(value.offset_bytes, value.num_bytes)

    def array(self, key: str) -> list[Scalar]:
        """The elements of an array; a scalar counts as an array of one."""
        value = self.metadata[key].value
        if not isinstance(value, GgufArray):
            return [value]
        data = self.source.read(value.offset_bytes, value.num_bytes)
        if value.element_type is GgufType.STRING:
            return list(_strings(data, value.num_elements))
        return list(struct.unpack(f"<{value.num_elements}{FORMATS[value.element_type]}", data))

    def scalar(self, key: str) -> Scalar | None:
        """A scalar, or None where the key is missing or an array."""
        entry = self.metadata.get(key)
        return None if entry is None or isinstance(entry.value, GgufArray) else entry.value

    def text(self, key: str, default: str | None = None) -> str:
        """A string; `MalformedModelError` where it is missing (and there is no default) or no string."""
        value = self.scalar(key)
        if key not in self.metadata and default is not None:
            return default
        if not isinstance(value, str):
            raise self.complaint(f"the key '{key}' is {'missing' if key not in self.metadata else 'not a string'}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A non-negative integer; `MalformedModelError` where it is missing (and there is no default) or none."""
        value = self.scalar(key)
        if key not in self.metadata and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MAX_INTEGER:
            what = "missing" if key not in self.metadata else f"{str(value)[:40]!r}, which is no possible size"
            raise self.complaint(f"the key '{key}' is {what}")
        return value

    def integers(self, key: str, count: int, default: int | None = None) -> list[int]:
        """One integer a layer: an array of at least `count`, or one number for all."""
        entry = self.metadata.get(key)
        if entry is None or not isinstance(entry.value, GgufArray):
            return [self.integer(key, default)] * count
        if entry.value.element_type in (GgufType.STRING, GgufType.FLOAT32, GgufType.FLOAT64):
            raise self.complaint(f"the key '{key}' holds no integers")
        values = [int(v) for v in self.array(key)]
        if len(values) < count or min(values, default=0) < 0 or max(values, default=0) >= MAX_INTEGER:
            raise self.complaint(f"the key '{key}' must hold {count} sizes, one a layer")
        return values[:count]

    def complaint(self, message: str) -> MalformedModelError:
        """An error about this file."""
        return MalformedModelError(brief(message), where=self.source.name, hint="the file is damaged or made by a faulty tool")


def brief(text: str, limit: int = 300) -> str:
    """Names from a damaged file can have 64 KiB; an error is one line that can be read."""
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def read_gguf_header(path: str | Path | ByteSource) -> GgufHeader:
    """Read and check the header of one GGUF file (for a split model: of that part)."""
    source = LocalFile.open(path) if isinstance(path, (str, Path)) else path
    if (known := _known_header(source)) is not None:
        return known
    cursor = _Cursor(source)
    num_tensors, num_keys, version = _read_counts(cursor)
    metadata = _read_metadata(cursor, num_keys)
    alignment = _alignment(cursor, metadata)
    infos = _read_tensor_infos(cursor, num_tensors)
    data_offset = -(-cursor.position // alignment) * alignment
    tensors = tuple(_place(cursor, info, data_offset, alignment) for info in infos)
    _refuse_overlaps(cursor, tensors)
    header = GgufHeader(source, version, alignment, metadata, tensors, data_offset)
    _remember(header, cursor.walked())
    return header


@dataclass(frozen=True, slots=True)
class _Known:
    """A header that was read before, and the digest of the bytes that it was read from."""

    header: GgufHeader
    num_bytes: int
    sha256: bytes


_known: dict[tuple[str, int], _Known] = {}  # by name and size of the file


def _known_header(source: ByteSource) -> GgufHeader | None:
    """What reading would give, where its bytes are still the same: hashing them takes a tenth of the walk over a vocabulary."""
    known = _known.get((source.name, source.size_bytes)) if not source.is_remote else None
    if known is None or hashlib.sha256(source.read(0, known.num_bytes)).digest() != known.sha256:
        return None
    return replace(known.header, source=source)


def _remember(header: GgufHeader, read: bytes) -> None:
    """The latest `MAX_KNOWN` files of this machine: a start describes its model, then looks at its slices."""
    if not header.source.is_remote:
        for oldest in list(_known)[: max(0, len(_known) + 1 - MAX_KNOWN)]:
            _known.pop(oldest, None)
        _known[header.source.name, header.file_bytes] = _Known(header, len(read), hashlib.sha256(read).digest())


class _Cursor:
    """Reads little-endian values from the growing beginning of a file; every refusal names byte and field."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.position = 0
        self._buffer = bytearray()

    def walked(self) -> bytes:
        """All that anything was concluded from, from the first byte on."""
        return bytes(self._buffer[: self.position])

    def fail(self, message: str) -> MalformedModelError:
        return MalformedModelError(brief(message), where=self.source.name, hint="the file is damaged; download it again")

    def need(self, num_bytes: int, what: str) -> None:
        """Have `num_bytes` from the position in the buffer, or say what is cut off."""
        end = self.position + num_bytes
        if end <= len(self._buffer):
            return
        if end > self.source.size_bytes:
            raise self.fail(f"the file ends at byte {self.source.size_bytes}, inside {what}")
        if end > MAX_HEADER_BYTES:
            raise self.fail(f"the header claims more than {MAX_HEADER_BYTES >> 20} MiB, in {what} at byte {self.position}")
        wanted = min(max(end, 2 * len(self._buffer), 256 << 10), MAX_HEADER_BYTES, self.source.size_bytes)
        self._buffer += self.source.read(len(self._buffer), wanted - len(self._buffer))

    def take(self, num_bytes: int, what: str) -> bytes:
        self.need(num_bytes, what)
        start = self.position
        self.position += num_bytes
        return bytes(self._buffer[start : self.position])

    def number(self, kind: GgufType, what: str) -> int:
        value: int = struct.unpack("<" + FORMATS[kind], self.take(struct.calcsize("<" + FORMATS[kind]), what))[0]
        return value

    def string(self, what: str, limit: int = MAX_HEADER_BYTES) -> str:
        start = self.position
        length = self.number(GgufType.UINT64, f"the length of {what}")
        if length > limit:
            raise self.fail(f"{what} at byte {start} claims {length} bytes")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} at byte {start} is not UTF-8") from error

    def skip_strings(self, count: int, what: str) -> None:
        """Walk over strings without making objects of them: 0.2 us each."""
        unpack = struct.Struct("<Q").unpack_from
        position, buffer, end = self.position, self._buffer, len(self._buffer)
        for _ in range(count):
            if position + 8 > end:
                self.position = position
                self.need(8, what)
                end = len(buffer)
            position += 8 + unpack(buffer, position)[0]
            if position > end:
                # The next round's (or the last) check reports where the file ends; a length of 2^60 stops here.
                self.position, length = end, position - end
                self.need(length, what)
                end = len(buffer)
        self.position = position


def _read_counts(cursor: _Cursor) -> tuple[int, int, int]:
    """Magic, version, counts -> (tensors, keys, version)."""
    name = cursor.source.name
    if cursor.source.size_bytes < 4 or cursor.take(4, "the magic") != MAGIC:
        raise MalformedModelError("this is not a GGUF file", where=name, hint="it must begin with the letters GGUF")
    version = cursor.number(GgufType.UINT32, "the version")
    if version & 0xFFFF == 0 and version:
        raise UnsupportedModelError("this GGUF file is big-endian", where=name, hint="convert it with gguf-convert-endian")
    if version not in VERSIONS:
        allowed = " and ".join(map(str, VERSIONS))
        raise UnsupportedModelError(f"GGUF version {version} is unknown", where=name, hint=f"versions {allowed} can be read")
    num_tensors = cursor.number(GgufType.UINT64, "the tensor count")
    num_keys = cursor.number(GgufType.UINT64, "the key count")
    for count, what in ((num_tensors, "tensors"), (num_keys, "metadata keys")):
        if count > MAX_ENTRIES or count * 13 > cursor.source.size_bytes:
            raise cursor.fail(f"the header claims {count} {what}, more than the file can hold")
    return num_tensors, num_keys, version


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, GgufValue]:
    metadata: dict[str, GgufValue] = {}
    for index in range(num_keys):
        key = cursor.string(f"metadata key {index + 1} of {num_keys}", MAX_NAME_BYTES)
        if not key or key in metadata:
            raise cursor.fail(f"metadata key {index + 1} {'is empty' if not key else f'repeats {key!r}'}")
        metadata[key] = _read_value(cursor, key)
    return metadata


def _value_type(cursor: _Cursor, what: str) -> GgufType:
    number = cursor.number(GgufType.UINT32, f"the type of {what}")
    try:
        return GgufType(number)
    except ValueError:
        raise cursor.fail(f"{what} has the unknown type {number}") from None


def _read_value(cursor: _Cursor, key: str) -> GgufValue:
    what = f"the value of {key!r}"
    kind = _value_type(cursor, what)
    start = cursor.position
    value: Scalar | GgufArray
    if kind is GgufType.ARRAY:
        value = _read_array(cursor, what)
    elif kind is GgufType.STRING:
        value = cursor.string(what)
    else:
        value = cursor.number(kind, what)
    return GgufValue(kind, value, start, cursor.position - start)


def _read_array(cursor: _Cursor, what: str) -> GgufArray:
    """Type, count, and a walk over the elements."""
    kind = _value_type(cursor, what)
    if kind is GgufType.ARRAY:
        raise cursor.fail(f"{what} is an array of arrays")
    count = cursor.number(GgufType.UINT64, f"the length of {what}")
    element_bytes = 8 if kind is GgufType.STRING else struct.calcsize("<" + FORMATS[kind])
    left = cursor.source.size_bytes - cursor.position
    if count > MAX_ARRAY_ELEMENTS or count * element_bytes > left:
        raise cursor.fail(f"{what} claims {count} elements, more than the file can hold")
    start = cursor.position
    if kind is GgufType.STRING:
        cursor.skip_strings(count, what)
    else:
        cursor.need(count * element_bytes, what)
        cursor.position += count * element_bytes
    return GgufArray(kind, count, start, cursor.position - start)


def _alignment(cursor: _Cursor, metadata: dict[str, GgufValue]) -> int:
    entry = metadata.get("general.alignment")
    value = 32 if entry is None else entry.value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0 or value & (value - 1) or value > 1 << 20:
        raise cursor.fail("general.alignment is not a power of two of at most 2^20")
    return value


def _read_tensor_infos(cursor: _Cursor, num_tensors: int) -> list[tuple[str, tuple[int, ...], int, int]]:
    """(name, shape, type number, offset within the data) of each tensor."""
    infos: list[tuple[str, tuple[int, ...], int, int]] = []
    names: set[str] = set()
    for index in range(num_tensors):
        name = cursor.string(f"the name of tensor {index + 1} of {num_tensors}", MAX_NAME_BYTES)
        if not name or name in names:
            raise cursor.fail(f"tensor {index + 1} {'has no name' if not name else f'repeats the name {name!r}'}")
        names.add(name)
        num_dims = cursor.number(GgufType.UINT32, f"tensor {name!r}")
        if num_dims > MAX_DIMS:
            raise cursor.fail(f"tensor {name!r} claims {num_dims} dimensions, {MAX_DIMS} are possible")
        shape = tuple(cursor.number(GgufType.INT64, f"tensor {name!r}") for _ in range(num_dims))
        if any(size <= 0 for size in shape):
            raise cursor.fail(f"tensor {name!r} claims the shape {list(shape)}")
        infos.append((name, shape, cursor.number(GgufType.UINT32, f"tensor {name!r}"), cursor.number(GgufType.UINT64, name)))
    return infos


def _place(cursor: _Cursor, info: tuple[str, tuple[int, ...], int, int], data_offset: int, alignment: int) -> GgufTensor:
    """Check one tensor's type and span against the file."""
    name, shape, type_id, offset = info
    kind = ggml_types().get(type_id)
    if kind is None:
        known = ", ".join(sorted(q.name for q in ggml_types().values()))
        message = brief(f"tensor {name!r} has the unknown quantization {type_id}")
        raise UnsupportedModelError(message, where=cursor.source.name, hint=f"known are {known}")
    try:
        num_bytes = tensor_bytes(shape, kind)
    except MalformedModelError as error:
        raise cursor.fail(f"tensor {name!r}: {error.message}") from None
    if offset % alignment:
        raise cursor.fail(f"tensor {name!r} lies at {offset}, which is no multiple of {alignment}")
    end = data_offset + offset + num_bytes
    if end > cursor.source.size_bytes:
        message = brief(f"the file has {cursor.source.size_bytes} bytes, but tensor {name!r} ends at byte {end}")
        raise MalformedModelError(message, where=cursor.source.name, hint="it is not complete: download it again")
    return GgufTensor(name, shape, type_id, kind.name, data_offset + offset, num_bytes)


def _refuse_overlaps(cursor: _Cursor, tensors: tuple[GgufTensor, ...]) -> None:
    ordered = sorted(tensors, key=lambda t: t.offset_bytes)
    for before, after in pairwise(ordered):
        if before.offset_bytes + before.num_bytes > after.offset_bytes:
            raise cursor.fail(f"the tensors {before.name!r} and {after.name!r} overlap")


def _strings(data: bytes, count: int) -> list[str]:
    """Strings with a length of 8 bytes before each; bytes that are no UTF-8 become U+FFFD."""
    out: list[str] = []
    position = 0
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", data, position)
        position += 8 + length
        out.append(data[position - length : position].decode("utf-8", "replace"))
    return out
