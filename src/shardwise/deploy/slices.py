"""From a model and a split to the files of each stage and the manifest that identifies them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardwise.deploy.options import RunOptions
from shardwise.errors import CorruptWeightsError, UsageError
from shardwise.model.description import ModelDescription
from shardwise.shards.manifest import Manifest, ManifestSettings
from shardwise.shards.packing import make_manifest, pack_model
from shardwise.shards.pieces import LocalPieces, PieceSource, Place, pieces_of_files
from shardwise.shards.slicing import slice_model
from shardwise.shards.stage_paths import StageFiles
from shardwise.shards.stage_paths import stage_files as shards_stage_files
from shardwise.shards.verify import paths_in
from shardwise.stage.llama.library import package_version
from shardwise.stage.own_slice import PieceAddress, SliceOrder
from shardwise.transport.messages import PROTOCOL_VERSION

Progress = Callable[[int, int], None]


def prepare_slices(
    model: ModelDescription, options: RunOptions, progress: Progress | None = None
) -> tuple[Manifest, list[StageFiles]]:
    """Cut (or find) every stage's files in the cache. One stage uses the model's own file; nothing is copied."""
    source = weights_path(model)
    counts = options.layer_counts(model)
    directory = slice_dir(model, options)
    settings = manifest_settings(options)
    if len(counts) == 1:
        manifest = make_manifest(source, counts, settings, stamp_dir=directory, progress=progress).manifest
        return manifest, [slice_model(source, 0, model.num_layers, directory)]
    manifest = pack_model(source, counts, directory, settings, progress=progress)
    return manifest, stage_files(manifest, directory)


def recut_stage(model: ModelDescription, options: RunOptions, manifest: Manifest, stage: int) -> None:
    """Make a stage's files anew, because they were found damaged. `CorruptWeightsError` where the model itself is."""
    if len(manifest.stages) == 1:
        raise CorruptWeightsError("the model's own file is damaged", where=str(weights_path(model)), hint="download it again")
    for file in manifest.stages[stage].files:
        (slice_dir(model, options) / file.name).unlink(missing_ok=True)
    again, _ = prepare_slices(model, options)
    if again.digest != manifest.digest:
        raise CorruptWeightsError(
            "the model's file has changed", where=str(weights_path(model)), expected=manifest.digest, actual=again.digest
        )


def weights_path(model: ModelDescription) -> Path:
    """The (first) file with the weights; `UsageError` where there is none, as for a preset."""
    if not model.source.paths:
        raise UsageError(
            f"'{model.source.reference}' has no weights on this machine",
            where="MODEL",
            hint="give a .gguf file, hf:..., or 'sample'",
        )
    return Path(model.source.paths[0])


def manifest_settings(options: RunOptions) -> ManifestSettings:
    """What every node must agree on besides the weights."""
    return ManifestSettings(
        protocol_version=PROTOCOL_VERSION,
        wire_dtype=options.wire_dtype,
        context_tokens=options.context_tokens,
        kv_type=options.kv_type,
        libraries=(("llama-cpp-python", package_version()),),
    )


def slice_dir(model: ModelDescription, options: RunOptions) -> Path:
    """Where this machine keeps the slices of a model and a split."""
    counts = options.layer_counts(model)
    return options.cache() / "slices" / model.revision_digest[:16] / "-".join(map(str, counts))


def stage_files(manifest: Manifest, directory: Path) -> list[StageFiles]:
    """The files of a packed directory."""
    stages = enumerate(manifest.stages)
    return [shards_stage_files(manifest, index, paths_in(directory, stage.files)) for index, stage in stages]


def slice_orders(
    model: ModelDescription, manifest: Manifest, options: RunOptions, peers: tuple[PieceAddress, ...] = ()
) -> list[SliceOrder]:
    """What each stage's worker must hold, and where it finds it: in this machine's cache if the worker runs here, in the
    model's own file where its node has one under the same path, from `peers` otherwise."""
    directory, sources = slice_dir(model, options), tuple(str(path) for path in model.source.paths)
    return [
        SliceOrder(
            manifest=manifest,
            paths=sources if len(manifest.stages) == 1 else tuple(str(directory / file.name) for file in stage.files),
            record_dir=str(directory),
            paranoid=options.paranoid,
            model_files=sources,
            folders=options.weights_from,
            peers=peers,
            peer_bytes_per_s=options.fetch_bytes_per_s or None,
        )
        for stage in manifest.stages
    ]


def servable_pieces(model: ModelDescription, manifest: Manifest, options: RunOptions) -> PieceSource:
    """Every piece of a deployment on this machine, to serve to the nodes that lack some."""
    if len(manifest.stages) == 1:
        paths = dict(zip((f.name for f in manifest.stages[0].files), map(Path, model.source.paths), strict=True))
        return LocalPieces(
            manifest.model,
            {p.sha256: Place(paths[f.name], p.offset_bytes, p.num_bytes) for f in manifest.stages[0].files for p in f.pieces},
        )
    files = [file for stage in manifest.stages for file in stage.files]
    return pieces_of_files(manifest.model, slice_dir(model, options), files)
