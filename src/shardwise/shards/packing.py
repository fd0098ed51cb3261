"""Makes the manifest of a model and a split, and the slices, in one reading of the model.

In: a `.gguf` path, layers a stage, `ManifestSettings`. Out: a `Manifest`, in memory (`make_manifest`: hashes only, for a
coordinator that serves pieces straight from the model's file) or with all files in a directory (`pack_model`). **Promises**
a second call with an unchanged model and equal arguments reads and writes no weight; a file that the new split shares with
the old one is kept; `manifest.json` appears last; where the directory is removed meanwhile the work is done once more.
**Fails with** `UsageError` (ranges, disk space, permission), `UnsupportedModelError`, `MalformedModelError`,
`CorruptWeightsError` (the file is not what the Hub says, or changed while it was read).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from shardwise.errors import CorruptWeightsError, UsageError
from shardwise.model.gguf import describe_headers
from shardwise.model.identity import file_sha256
from shardwise.records import digest
from shardwise.shards.gguf_source import GgufSource
from shardwise.shards.gguf_writer import make_directory, require_space
from shardwise.shards.layout import FileLayout, StageLayout, lay_out_stage, plain_name
from shardwise.shards.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestSettings,
    SliceFile,
    SourceFile,
    StageSlice,
    check_manifest,
    corrupt,
    load_manifest,
    save_manifest,
)
from shardwise.shards.pack_stamp import PackStamp, known_places, make_stamp, read_stamp, unchanged_files, write_stamp
from shardwise.shards.slicing import again_if_removed
from shardwise.shards.spans import SpanHasher
from shardwise.shards.verify import OnProgress

_HUB_BLOB = re.compile(r"^[0-9a-f]{64}$")


@dataclass(frozen=True, slots=True)
class Packing:
    """A manifest, and where the bytes behind each of its pieces lie on this machine."""

    manifest: Manifest
    layouts: tuple[StageLayout, ...]


def ranges_of(layer_counts: Sequence[int], num_layers: int) -> list[tuple[int, int]]:
    """`[10, 12, 8]` -> `[(0, 10), (10, 22), (22, 30)]`; `UsageError` unless they are positive and add up."""
    if not layer_counts or min(layer_counts) < 1 or sum(layer_counts) != num_layers:
        shown = ",".join(map(str, layer_counts))
        raise UsageError(
            f"layers {shown} do not make up the {num_layers} layers of this model",
            where="layers",
            hint=f"give one positive number a stage, together {num_layers}",
        )
    bounds = [sum(layer_counts[:i]) for i in range(len(layer_counts) + 1)]
    return list(pairwise(bounds))


def make_manifest(
    gguf_path: str | Path,
    layer_counts: Sequence[int],
    settings: ManifestSettings,
    *,
    stamp_dir: Path | None = None,
    progress: OnProgress | None = None,
) -> Packing:
    """Hash the model (once: digests are kept in `stamp_dir`) and describe the slices without writing them."""
    path = Path(gguf_path)
    return again_if_removed(stamp_dir or path.parent, lambda: _hash(_Job(path, layer_counts, progress), settings, stamp_dir))


def _hash(job: _Job, settings: ManifestSettings, stamp_dir: Path | None) -> Packing:
    stamp = read_stamp(stamp_dir, job.source) if stamp_dir is not None else None
    job.total_bytes = sum(f.num_bytes for f in job.files) if stamp is None else 0
    hasher = SpanHasher(known_places(stamp, job.source), job.on_bytes)
    try:
        files = {file.name: hasher.hash_file(file) for file in job.files}
    finally:
        hasher.close()
    manifest = _assemble(job, settings, files, stamp)
    if stamp_dir is not None:
        make_directory(stamp_dir)
        write_stamp(stamp_dir, make_stamp(job.source, manifest, None, hasher.known))
    return Packing(manifest, job.layouts)


def pack_model(
    gguf_path: str | Path,
    layer_counts: Sequence[int],
    out_dir: str | Path,
    settings: ManifestSettings,
    *,
    progress: OnProgress | None = None,
) -> Manifest:
    """Write every stage's slice and `manifest.json` into `out_dir`; `progress(done_bytes, total_bytes)` after each block."""
    path, directory = Path(gguf_path), Path(out_dir)
    return again_if_removed(directory, lambda: _pack(_Job(path, layer_counts, progress), settings, directory))


def _pack(job: _Job, settings: ManifestSettings, directory: Path) -> Manifest:
    make_directory(directory)
    stamp = read_stamp(directory, job.source)
    old = _old_manifest(directory)
    kept = unchanged_files(directory, stamp, old, job.files)
    missing = [file for file in job.files if file.name not in kept]
    job.total_bytes = sum(file.num_bytes for file in missing)
    require_space(directory, job.total_bytes)
    _refuse_overwriting_source(directory, missing, job.source)
    hasher = SpanHasher(known_places(stamp, job.source), job.on_bytes)
    try:
        files = kept | {file.name: hasher.write_file(file, directory) for file in missing}
    finally:
        hasher.close()
    manifest = _assemble(job, settings, files, stamp)
    if old != manifest:
        save_manifest(manifest, directory)
        _remove_leftovers(directory, old, manifest)
    write_stamp(directory, make_stamp(job.source, manifest, directory, hasher.known))
    return manifest


class _Job:
    """One model, one split, and how far it is."""

    def __init__(self, path: Path, layer_counts: Sequence[int], progress: OnProgress | None) -> None:
        self.path = path
        self.source = GgufSource(path)
        self.description = describe_headers(self.source.headers, reference=str(path), paths=self.source.paths)
        ranges = ranges_of(layer_counts, self.description.num_layers)
        self.layouts = tuple(lay_out_stage(self.source, start, end) for start, end in ranges)
        self.files: list[FileLayout] = [file for layout in self.layouts for file in layout.files]
        self.total_bytes = 0
        self._done_bytes = 0
        self._progress = progress

    def on_bytes(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, max(self.total_bytes, self._done_bytes))


def _assemble(job: _Job, settings: ManifestSettings, files: dict[str, SliceFile], stamp: PackStamp | None) -> Manifest:
    description = job.description
    types = sorted((t.name, t.quantization) for t in description.all_tensors())
    manifest = Manifest(
        model=description.name,
        architecture=description.architecture,
        num_layers=description.num_layers,
        revision_digest=description.revision_digest,
        tokenizer_digest=description.tokenizer.digest,
        quantization=description.quantization,
        quantization_digest=digest(types),
        source_files=stamp.source_files if stamp is not None else tuple(_source_file(path) for path in job.source.paths),
        settings=settings,
        stages=tuple(_stage_slice(layout, files) for layout in job.layouts),
    )
    check_manifest(manifest, where=str(job.path))
    return manifest


def _stage_slice(layout: StageLayout, files: dict[str, SliceFile]) -> StageSlice:
    facts = layout.facts
    return StageSlice(
        start=facts.start,
        end=facts.end,
        weights=facts.weights,
        embedding=facts.embedding,
        files=tuple(files[file.name] for file in layout.files),
        input_scale=facts.input_scale,
        input_batch=facts.input_batch,
        input_node=facts.input_node,
        output_node=facts.output_node,
        weight_bytes=facts.weight_bytes,
    )


def _source_file(path: Path) -> SourceFile:
    """In the Hub's cache a large file is a link to a blob that is named by its SHA-256: compare."""
    expected = path.resolve().name
    if not (_HUB_BLOB.match(expected) and path.resolve().parent.name == "blobs"):
        return SourceFile(name=plain_name(path.name), num_bytes=path.stat().st_size)
    actual = file_sha256(path)
    if actual != expected:
        raise corrupt("the file is not the one that the Hub has", str(path), expected=expected, actual=actual, tensor="")
    return SourceFile(name=plain_name(path.name), num_bytes=path.stat().st_size, sha256=actual)


def _old_manifest(directory: Path) -> Manifest | None:
    try:
        return load_manifest(directory) if (directory / MANIFEST_NAME).exists() else None
    except CorruptWeightsError:
        return None  # it is about to be written anew


def _refuse_overwriting_source(directory: Path, files: list[FileLayout], source: GgufSource) -> None:
    targets = {(directory / file.name).resolve() for file in files}
    for path in source.paths:
        if path.resolve() in targets:
            raise UsageError("the output would overwrite the model itself", where=str(path), hint="choose another --out")


def _remove_leftovers(directory: Path, old: Manifest | None, new: Manifest) -> None:
    """Slices of the split that was in this directory before; nothing else is touched."""
    if old is None:
        return
    wanted = {file.name for stage in new.stages for file in stage.files}
    for name in {file.name for stage in old.stages for file in stage.files} - wanted:
        (directory / name).unlink(missing_ok=True)
