"""Where pieces can be read from: the seam between the transfer and disks, folders and peers.

A `PieceSource` hands out bytes of pieces by digest. It need not be trusted: whoever reads hashes. `LocalPieces` is the one for
everything that this machine can open as a file; peers are reached through `transport.pieces`. No socket here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardwise.errors import CorruptWeightsError, UsageError
from shardwise.shards.layout import StageLayout
from shardwise.shards.manifest import Manifest, SliceFile, corrupt, load_manifest
from shardwise.shards.packing import Packing

THIS_MACHINE, FOLDER, PEER = 0, 1, 2  # ranks: the lowest is asked first


class PieceSource(Protocol):
    """Hands out bytes of pieces; called from several threads at once.

    Promises: `read` returns what it has, exactly as long as asked, or raises. Fails when: it does not have the piece, or has
    it shorter than asked (`CorruptWeightsError`); a peer is away (`NetworkError`).
    """

    @property
    def name(self) -> str:
        """What reports and errors call it."""

    @property
    def rank(self) -> int:
        """0 this machine, 1 a mounted folder, 2 a peer."""

    def holds(self, digests: Collection[str]) -> set[str]:
        """Which of these pieces it has."""

    def read(self, digest: str, offset_bytes: int, num_bytes: int) -> bytes:
        """`num_bytes` of a piece from `offset_bytes` on."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece lies."""

    path: Path
    offset_bytes: int
    num_bytes: int


class LocalPieces:
    """Pieces in files, and small ones in memory."""

    def __init__(
        self, name: str, places: Mapping[str, Place], memory: Mapping[str, bytes] | None = None, *, rank: int = THIS_MACHINE
    ) -> None:
        self.name = name
        self.rank = rank
        self._places = dict(places)
        self._memory = dict(memory or {})

    def holds(self, digests: Collection[str]) -> set[str]:
        return {d for d in digests if d in self._places or d in self._memory}

    def read(self, digest: str, offset_bytes: int, num_bytes: int) -> bytes:
        if digest in self._memory:
            data = self._memory[digest][offset_bytes : offset_bytes + num_bytes]
        else:
            data = self._read_file(digest, offset_bytes, num_bytes)
        if len(data) != num_bytes:
            raise corrupt("a piece is shorter than it must be", self.name, expected=num_bytes, actual=len(data), tensor=digest)
        return data

    def _read_file(self, digest: str, offset_bytes: int, num_bytes: int) -> bytes:
        place = self._places.get(digest)
        if place is None:
            raise corrupt("a piece that is not here", self.name, expected=digest, actual="nothing", tensor="")
        if not 0 <= offset_bytes <= offset_bytes + num_bytes <= place.num_bytes:
            raise corrupt(
                "more than the piece holds", self.name, expected=place.num_bytes, actual=offset_bytes + num_bytes, tensor=""
            )
        try:
            with place.path.open("rb", buffering=0) as file:
                file.seek(place.offset_bytes + offset_bytes)
                return file.read(num_bytes)
        except OSError as error:
            message = f"cannot read the file: {error.strerror}"
            raise corrupt(message, str(place.path), expected="a file", actual="", tensor="") from error


def pieces_of_files(name: str, directory: Path, files: Sequence[SliceFile], *, rank: int = THIS_MACHINE) -> LocalPieces:
    """Slices in a folder."""
    return LocalPieces(name, places_of_files(directory, files), rank=rank)


def places_of_files(directory: Path, files: Sequence[SliceFile]) -> dict[str, Place]:
    """Digest -> place, for the pieces of these files."""
    return {p.sha256: Place(directory / f.name, p.offset_bytes, p.num_bytes) for f in files for p in f.pieces}


def pieces_of_folder(directory: Path, *, rank: int = FOLDER) -> LocalPieces:
    """A packed folder (a NAS, a USB disk), whatever deployment it was packed for."""
    manifest = load_manifest(directory)
    files = [file for stage in manifest.stages for file in stage.files]
    return pieces_of_files(str(directory), directory, files, rank=rank)


def pieces_of_model(manifest: Manifest, paths: Sequence[Path], *, rank: int = THIS_MACHINE) -> LocalPieces:
    """The model's own file(s), where this machine has them: all tensors, no slice headers."""
    sizes = [file.num_bytes for file in manifest.source_files]
    try:
        found = [path.stat().st_size for path in paths]
    except OSError as error:
        raise UsageError(f"cannot read the model: {error.strerror}", where=str(error.filename), hint="check the path") from error
    if found != sizes:
        raise CorruptWeightsError("not the model of the manifest", where=str(paths[0]), expected=sizes, actual=found)
    places = {
        p.sha256: Place(paths[p.origin_file], p.origin_offset_bytes, p.num_bytes)
        for stage in manifest.stages
        for file in stage.files
        for p in file.pieces
        if 0 <= p.origin_file < len(paths)
    }
    return LocalPieces(str(paths[0]), places, rank=rank)


def pieces_of_packing(packing: Packing) -> LocalPieces:
    """Everything that a manifest lists, straight from the model's file and memory: what a coordinator serves."""
    places: dict[str, Place] = {}
    memory: dict[str, bytes] = {}
    for stage, layout in zip(packing.manifest.stages, packing.layouts, strict=True):
        _add_stage(stage.files, layout, places, memory)
    return LocalPieces(packing.manifest.model, places, memory)


def _add_stage(files: Sequence[SliceFile], layout: StageLayout, places: dict[str, Place], memory: dict[str, bytes]) -> None:
    for file, file_layout in zip(files, layout.files, strict=True):
        for piece, span in zip(file.pieces, file_layout.spans, strict=True):
            if span.path is not None:
                places[piece.sha256] = Place(span.path, span.source_offset_bytes, span.num_bytes)
            else:
                memory[piece.sha256] = span.data if span.data is not None else bytes(span.num_bytes)
