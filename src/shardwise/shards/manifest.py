"""The signed-off list of what must run: every slice's every byte, by digest.

A `Manifest` flows from `pack` to every node; its canonical bytes are `manifest.json`, and their SHA-256 identifies a
deployment.
**Promises** `load_manifest` returns only what is canonical, whole and safe to use (no path leaves its folder, no piece
overlaps).
**Fails with** `CorruptWeightsError` that says what is wrong where. **Called by** pack, verify, store, transfer, the handshake.

Offsets and sizes in bytes; shapes in ggml's order, fastest dimension first.
"""

from __future__ import annotations

import hashlib
import re
from itertools import pairwise
from pathlib import Path

from shardwise.errors import CorruptWeightsError, UsageError
from shardwise.records import Record, digest, from_json, to_json

MANIFEST_NAME = "manifest.json"
DIGEST_NAME = "manifest.sha256"
MAX_MANIFEST_BYTES = 64 * 2**20
_SHA256 = re.compile(r"^[0-9a-f]{64}$")
_FILE_NAME = re.compile(r"^[A-Za-z0-9_+\-][A-Za-z0-9_.+\-]{0,199}$")
_DEVICES = {"con", "prn", "aux", "nul", *(f"{d}{n}" for d in ("com", "lpt") for n in range(1, 10))}  # Windows opens these


class Piece(Record, omit_defaults=True):
    """A run of bytes of a slice file. `origin_*` tell where the model's own files hold the same bytes."""

    name: str  # the tensor's name in this file, or what part of the header it is
    offset_bytes: int
    num_bytes: int
    sha256: str
    kind: str = "tensor"  # tensor | header | padding (bytes between tensors that are not zero)
    dtype: str = ""
    shape: tuple[int, ...] = ()
    origin: str = ""  # the tensor's name in the model
    origin_file: int = -1  # which part of the model; -1 = made by slicing
    origin_offset_bytes: int = 0


class SliceFile(Record):
    """One file of a stage. Bytes that no piece covers are zero."""

    name: str
    num_bytes: int
    pieces: tuple[Piece, ...]


class StageSlice(Record):
    """What one stage holds, and how its backend must feed it (see `slicing.StageFiles`)."""

    start: int
    end: int
    weights: str  # name of the file that llama.cpp loads
    embedding: str | None  # name of the file with the token embedding; first stage only
    files: tuple[SliceFile, ...]
    input_scale: float = 1.0
    input_batch: str = "embeddings"
    input_node: str | None = None
    output_node: str = ""
    weight_bytes: int = 0

    @property
    def slice_id(self) -> str:
        """Names the stage's content: equal for equal files, whatever deployment they belong to."""
        return digest(self.files)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


class SourceFile(Record):
    """A file of the model that was packed; `sha256` is filled in where the Hub tells one, and was compared."""

    name: str
    num_bytes: int
    sha256: str = ""


class ManifestSettings(Record):
    """What else must be the same on every node."""

    protocol_version: int
    wire_dtype: str = "f16"
    context_tokens: int = 2048
    kv_type: str = "f16"
    libraries: tuple[tuple[str, str], ...] = ()  # (name, version), sorted


class Manifest(Record):
    """A deployment's content. Node names and addresses are not in it: moving a stage to another node changes nothing here."""

    format: int = 1
    model: str
    architecture: str
    num_layers: int
    revision_digest: str
    tokenizer_digest: str
    quantization: str
    quantization_digest: str  # over (tensor, type) of the whole model
    source_files: tuple[SourceFile, ...]
    settings: ManifestSettings
    stages: tuple[StageSlice, ...]

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """[start, end) of every stage."""
        return tuple((stage.start, stage.end) for stage in self.stages)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the canonical bytes."""
        return digest(self)


def save_manifest(manifest: Manifest, directory: Path) -> str:
    """Write `manifest.json` and `manifest.sha256`, each atomically; returns the digest."""
    data = to_json(manifest)
    checksum = hashlib.sha256(data).hexdigest()
    for name, content in ((MANIFEST_NAME, data), (DIGEST_NAME, f"{checksum}  {MANIFEST_NAME}\n".encode())):
        beside = directory / f".{name}.part"
        beside.write_bytes(content)
        beside.replace(directory / name)
    return checksum


def load_manifest(directory: Path, *, expected: str = "") -> Manifest:
    """Read and check `manifest.json`. With `expected`, only the manifest of that digest is accepted; otherwise the one that
    `manifest.sha256` names."""
    path = directory / MANIFEST_NAME
    data = _read(path, MAX_MANIFEST_BYTES)
    if not expected:
        expected = _digest_file(directory / DIGEST_NAME)
    return parse_manifest(data, expected=expected, where=str(path))


def parse_manifest(data: bytes, *, expected: str = "", where: str = "") -> Manifest:
    """Check bytes that claim to be a manifest."""
    actual = hashlib.sha256(data).hexdigest()
    if expected and actual != expected:
        raise corrupt("the manifest is not the expected one", where, expected=expected, actual=actual, tensor="")
    try:
        manifest = from_json(data, Manifest, where=where)
    except UsageError as error:
        raise corrupt(error.message, where, expected="a manifest of format 1", actual="", tensor="") from error
    if to_json(manifest) != data:
        raise corrupt("the manifest is not in canonical form", where, expected=manifest.digest, actual=actual, tensor="")
    check_manifest(manifest, where=where)
    return manifest


def check_manifest(manifest: Manifest, *, where: str = "") -> None:
    """Ranges join up, names are plain, pieces lie in order inside their files; `CorruptWeightsError` otherwise."""
    bounds = [0, *(stage.end for stage in manifest.stages)]
    starts = [stage.start for stage in manifest.stages]
    if manifest.format != 1 or starts != bounds[:-1] or bounds[-1] != manifest.num_layers or sorted(set(bounds)) != bounds:
        raise _invalid(f"the layer ranges {manifest.layers} do not make up {manifest.num_layers} layers", where)
    for stage in manifest.stages:
        names = [file.name for file in stage.files]
        if len({name.lower() for name in names}) != len(names) or stage.weights not in names:
            raise _invalid(f"stage {stage.start}-{stage.end} names its files wrongly", where)
        if stage.embedding is not None and stage.embedding not in names:
            raise _invalid(f"stage {stage.start}-{stage.end} has no embedding file '{stage.embedding}'", where)
        for file in stage.files:
            _check_file(file, where)


def _check_file(file: SliceFile, where: str) -> None:
    plain_name = _FILE_NAME.match(file.name) and not file.name.endswith(".") and file.name.split(".")[0].lower() not in _DEVICES
    if not plain_name or file.name in (MANIFEST_NAME, DIGEST_NAME):
        raise _invalid(f"{file.name!r} is no plain file name", where)
    if not file.pieces or file.pieces[-1].offset_bytes + file.pieces[-1].num_bytes > file.num_bytes or file.num_bytes > 2**60:
        raise _invalid(f"the pieces of '{file.name}' do not fit into its {file.num_bytes} bytes", where)
    for piece in file.pieces:
        if piece.num_bytes < 1 or piece.offset_bytes < 0 or not _SHA256.match(piece.sha256):
            raise _invalid(f"piece '{piece.name}' of '{file.name}' is not valid", where)
    for before, after in pairwise(file.pieces):
        if before.offset_bytes + before.num_bytes > after.offset_bytes:
            raise _invalid(f"pieces '{before.name}' and '{after.name}' of '{file.name}' overlap", where)


def corrupt(message: str, where: str, *, expected: object, actual: object, tensor: str) -> CorruptWeightsError:
    """The error for content that is not what the manifest says."""
    return CorruptWeightsError(
        message,
        where=where,
        hint="fetch it again, or run 'shardwise pack' again",
        file=where,
        tensor=tensor,
        expected=expected,
        actual=actual,
    )


def _invalid(message: str, where: str) -> CorruptWeightsError:
    return corrupt(message, where, expected="a valid manifest", actual="", tensor="")


def _digest_file(path: Path) -> str:
    text = _read(path, 4096).decode("utf-8", "replace")
    checksum, _, name = text.partition("  ")
    if not _SHA256.match(checksum) or name != f"{MANIFEST_NAME}\n":
        raise corrupt("not a manifest's checksum", str(path), expected="SHA-256 and name", actual=text[:80], tensor="")
    return checksum


def _read(path: Path, limit_bytes: int) -> bytes:
    try:
        with path.open("rb") as source:
            data = source.read(limit_bytes + 1)
    except OSError as error:
        raise corrupt(
            f"cannot read the file: {error.strerror}", str(path), expected="a file", actual="none", tensor=""
        ) from error
    if len(data) > limit_bytes:
        raise corrupt(f"more than {limit_bytes} bytes", str(path), expected=limit_bytes, actual="more", tensor="")
    return data
