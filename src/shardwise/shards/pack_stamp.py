"""What lets a second `pack` read nothing: the model's size and times, its pieces' digests, and the written files' times.

In and out: `pack.stamp.json` in the output directory. A stamp that does not fit the model as it lies there now counts for
nothing. It only ever saves work: `verify` and the worker check content by themselves.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from shardwise.errors import UsageError
from shardwise.records import Record, from_json, to_json
from shardwise.shards.gguf_source import GgufSource
from shardwise.shards.layout import FileLayout
from shardwise.shards.manifest import Manifest, SliceFile, SourceFile
from shardwise.shards.spans import Place, piece_of

STAMP_NAME = "pack.stamp.json"


class KnownPlace(Record, array_like=True):
    """A digest of bytes of the model."""

    file: int
    offset_bytes: int
    num_bytes: int
    sha256: str


class WrittenFile(Record):
    """A slice when it was finished."""

    name: str
    num_bytes: int
    mtime_ns: int


class PackStamp(Record):
    """See the module."""

    header_digest: str  # SHA-256 of all headers of the model
    source_bytes: tuple[int, ...]
    source_mtime_ns: tuple[int, ...]
    source_files: tuple[SourceFile, ...]
    places: tuple[KnownPlace, ...]
    written: tuple[WrittenFile, ...]


def make_stamp(source: GgufSource, manifest: Manifest, directory: Path | None, known: dict[Place, str]) -> PackStamp:
    """The stamp of what has just been made; `directory` is None where nothing was written."""
    stats = [path.stat() for path in source.paths]
    index = {str(path): number for number, path in enumerate(source.paths)}
    names = sorted({file.name for stage in manifest.stages for file in stage.files})
    written = [] if directory is None else [(name, (directory / name).stat()) for name in names]
    return PackStamp(
        header_digest=source.header_digest,
        source_bytes=tuple(s.st_size for s in stats),
        source_mtime_ns=tuple(s.st_mtime_ns for s in stats),
        source_files=manifest.source_files,
        places=tuple(
            KnownPlace(file=index[path], offset_bytes=offset, num_bytes=size, sha256=sha256)
            for (path, offset, size), sha256 in sorted(known.items())
        ),
        written=tuple(WrittenFile(name=name, num_bytes=s.st_size, mtime_ns=s.st_mtime_ns) for name, s in written),
    )


def write_stamp(directory: Path, stamp: PackStamp) -> None:
    """Atomically; failing costs the next call time, nothing else."""
    beside = directory / f".{STAMP_NAME}.part"
    with contextlib.suppress(OSError):
        beside.write_bytes(to_json(stamp))
        beside.replace(directory / STAMP_NAME)


def read_stamp(directory: Path, source: GgufSource) -> PackStamp | None:
    """The stamp, if it belongs to the model as it is now."""
    try:
        stamp = from_json((directory / STAMP_NAME).read_bytes(), PackStamp)
        stats = [path.stat() for path in source.paths]
    except (OSError, UsageError):
        return None
    same = (
        stamp.header_digest == source.header_digest
        and stamp.source_bytes == tuple(s.st_size for s in stats)
        and stamp.source_mtime_ns == tuple(s.st_mtime_ns for s in stats)
        and len(stamp.source_files) == len(stats)
        and all(0 <= place.file < len(stats) for place in stamp.places)
    )
    return stamp if same else None


def known_places(stamp: PackStamp | None, source: GgufSource) -> dict[Place, str]:
    """Digests that need no reading."""
    if stamp is None:
        return {}
    return {(str(source.paths[p.file]), p.offset_bytes, p.num_bytes): p.sha256 for p in stamp.places}


def unchanged_files(
    directory: Path, stamp: PackStamp | None, old: Manifest | None, wanted: list[FileLayout]
) -> dict[str, SliceFile]:
    """Files that were written before from the same spans and have not been touched since."""
    if stamp is None or old is None:
        return {}
    listed = {file.name: file for stage in old.stages for file in stage.files}
    written = {file.name: file for file in stamp.written}
    out: dict[str, SliceFile] = {}
    for layout in wanted:
        before = listed.get(layout.name)
        mark = written.get(layout.name)
        if before is not None and mark is not None and _same_spans(layout, before) and _untouched(directory, mark):
            out[layout.name] = before
    return out


def _same_spans(layout: FileLayout, before: SliceFile) -> bool:
    """Every span is the piece that it was; the digests are those of an unchanged model."""
    if layout.num_bytes != before.num_bytes or len(layout.spans) != len(before.pieces):
        return False
    return all(piece_of(span, piece.sha256) == piece for span, piece in zip(layout.spans, before.pieces, strict=True))


def _untouched(directory: Path, mark: WrittenFile) -> bool:
    try:
        stat = (directory / mark.name).stat()
    except OSError:
        return False
    return (stat.st_size, stat.st_mtime_ns) == (mark.num_bytes, mark.mtime_ns)
