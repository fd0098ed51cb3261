"""Where every byte of a stage's files comes from, before any byte is read. Pure apart from reading headers.

In: a `GgufSource` and a range of layers. Out: `StageLayout`: files made of spans (header bytes that exist in memory, or a place
in the model's own files). The files are those that `slicing.slice_model` writes, byte for byte; a stage that holds the whole
model is the model's files as they lie. Fails like `slicing`.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

from shardwise.model.families import require_proved
from shardwise.model.gguf_header import GgufHeader, read_gguf_header
from shardwise.model.quantization import ggml_types
from shardwise.shards.gguf_source import GgufSource
from shardwise.shards.gguf_writer import OutTensor, encode_header, padded
from shardwise.shards.slice_recipe import embedding_entries, embedding_tensors, layer_kinds, slice_entries, slice_tensors
from shardwise.shards.slicing import check_range, count_layers, stage_files
from shardwise.shards.stage_paths import StageFiles

# Metadata entries from this size on (vocabulary, merges) are pieces of their own: they do not change with the range.
_OWN_PIECE_BYTES = 64 * 1024
_FIXED_HEADER_BYTES = 24  # magic, version, two counts


@dataclass(frozen=True, slots=True)
class Span:
    """A piece without its digest. Exactly one of `data` and `path` is set, or neither: zeros."""

    name: str
    kind: str
    offset_bytes: int
    num_bytes: int
    data: bytes | None = None
    path: Path | None = None
    source_offset_bytes: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    origin: str = ""
    origin_file: int = -1


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One file; bytes between spans are zero."""

    name: str
    num_bytes: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class StageLayout:
    """One stage. `facts` holds file names instead of paths."""

    facts: StageFiles
    files: tuple[FileLayout, ...]


def lay_out_stage(source: GgufSource, start: int, end: int) -> StageLayout:
    """The files of layers [start, end)."""
    family = require_proved(source.architecture)
    num_layers = count_layers(source)
    check_range(family, start, end, num_layers, layer_kinds(source, family, num_layers))
    layers = (start, end, num_layers)
    if (start, end) == (0, num_layers):
        files = tuple(_whole_file(source, index) for index in range(len(source.paths)))
        embedding = plain_name(source.tensors["token_embd.weight"].path.name)
        size = sum(t.num_bytes for t in source.tensors.values())
        return StageLayout(
            stage_files(source, family, layers, weights=files[0].name, embedding=embedding, weight_bytes=size), files
        )
    stem = plain_name(source.paths[0].name).removesuffix(".gguf")
    tensors = slice_tensors(source, family, start, end, num_layers)
    entries = slice_entries(source, family, start, end, num_layers)
    weights = _new_file(source, f"{stem}.layers-{start}-{end}.gguf", entries, tensors)
    made = [weights]
    if start == 0:
        made.append(_new_file(source, f"{stem}.embedding.gguf", embedding_entries(source), embedding_tensors(source)))
    facts = stage_files(
        source,
        family,
        layers,
        weights=weights.name,
        embedding=made[1].name if start == 0 else None,
        weight_bytes=sum(t.num_bytes for t in tensors),
    )
    return StageLayout(facts, tuple(made))


def plain_name(name: str) -> str:
    """A file name that every system takes: other characters become `_`."""
    return re.sub(r"[^A-Za-z0-9_.+\-]", "_", name).lstrip(".")[-150:] or "model.gguf"


def _new_file(source: GgufSource, name: str, entries: list[bytes], tensors: list[OutTensor]) -> FileLayout:
    header = encode_header(entries, tensors)
    spans = _header_spans(header, entries)
    by_place = {(t.path, t.offset_bytes): t.name for t in source.tensors.values()}
    parts = {path: index for index, path in enumerate(source.paths)}
    offset = len(header)
    for tensor in tensors:
        spans.append(
            Span(
                name=tensor.name,
                kind="tensor",
                offset_bytes=offset,
                num_bytes=tensor.num_bytes,
                path=tensor.path,
                source_offset_bytes=tensor.offset_bytes,
                dtype=ggml_types()[tensor.type_id].name,
                shape=tensor.shape,
                origin=by_place[tensor.path, tensor.offset_bytes] if tensor.path else "",
                origin_file=parts[tensor.path] if tensor.path else -1,
            )
        )
        offset += padded(tensor.num_bytes)
    return FileLayout(name, offset, tuple(spans))


def _header_spans(header: bytes, entries: list[bytes]) -> list[Span]:
    """The header cut so that each large entry stands alone."""
    spans: list[Span] = []

    def add(name: str, start: int, end: int) -> None:
        if end > start:
            spans.append(Span(name, "header", start, end - start, data=header[start:end]))

    begun = position = 0
    position = _FIXED_HEADER_BYTES
    for entry in entries:
        if len(entry) >= _OWN_PIECE_BYTES:
            add(f"header at {begun}", begun, position)
            add(_key(entry), position, position + len(entry))
            begun = position + len(entry)
        position += len(entry)
    add(f"header at {begun}", begun, len(header))
    return spans


def _key(entry: bytes) -> str:
    (length,) = struct.unpack_from("<Q", entry)
    return entry[8 : 8 + length].decode("utf-8", "replace")


def _whole_file(source: GgufSource, index: int) -> FileLayout:
    """A file of the model as it lies: header, tensors, and whatever is between them."""
    path = source.paths[index]
    header = read_gguf_header(path)
    tensors = sorted(header.tensors, key=lambda t: t.offset_bytes)
    first = tensors[0].offset_bytes if tensors else header.file_bytes
    spans = [Span("header", "header", 0, first, path=path, source_offset_bytes=0, origin_file=index)]
    position = first
    for tensor in tensors:
        spans.extend(_gap(header, path, index, position, tensor.offset_bytes))
        spans.append(
            Span(
                name=tensor.name,
                kind="tensor",
                offset_bytes=tensor.offset_bytes,
                num_bytes=tensor.num_bytes,
                path=path,
                source_offset_bytes=tensor.offset_bytes,
                dtype=tensor.quantization,
                shape=tensor.shape,
                origin=tensor.name,
                origin_file=index,
            )
        )
        position = tensor.offset_bytes + tensor.num_bytes
    spans.extend(_gap(header, path, index, position, header.file_bytes))
    return FileLayout(plain_name(path.name), header.file_bytes, tuple(spans))


def _gap(header: GgufHeader, path: Path, index: int, start: int, end: int) -> list[Span]:
    """Bytes between two tensors, unless they are zeros."""
    if start == end or not header.source.read(start, end - start).strip(b"\0"):
        return []
    return [Span(f"padding at {start}", "padding", start, end - start, path=path, source_offset_bytes=start, origin_file=index)]
