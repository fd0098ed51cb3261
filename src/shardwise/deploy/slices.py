"""From a model and a split to the files of each stage and the manifest that identifies them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

from shardwise.deploy.options import RunOptions
from shardwise.errors import UsageError
from shardwise.model.description import ModelDescription
from shardwise.shards.manifest import Manifest, ManifestSettings
from shardwise.shards.packing import make_manifest, pack_model
from shardwise.shards.slicing import StageFiles, slice_model
from shardwise.transport.messages import PROTOCOL_VERSION

Progress = Callable[[int, int], None]


def prepare_slices(
    model: ModelDescription, options: RunOptions, progress: Progress | None = None
) -> tuple[Manifest, list[StageFiles]]:
    """Cut (or find) every stage's files in the cache. One stage uses the model's own file; nothing is copied."""
    source = weights_path(model)
    counts = options.layer_counts(model)
    directory = options.cache() / "slices" / model.revision_digest[:16] / "-".join(map(str, counts))
    settings = manifest_settings(options)
    if len(counts) == 1:
        manifest = make_manifest(source, counts, settings, stamp_dir=directory, progress=progress).manifest
        return manifest, [slice_model(source, 0, model.num_layers, directory)]
    manifest = pack_model(source, counts, directory, settings, progress=progress)
    return manifest, stage_files(manifest, directory)


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
        libraries=(("llama-cpp-python", importlib.metadata.version("llama-cpp-python")),),
    )


def stage_files(manifest: Manifest, directory: Path) -> list[StageFiles]:
    """The files of a packed directory."""
    return [
        StageFiles(
            start=stage.start,
            end=stage.end,
            num_layers=manifest.num_layers,
            weights=str(directory / stage.weights),
            embedding=str(directory / stage.embedding) if stage.embedding else None,
            architecture=manifest.architecture,
            input_scale=stage.input_scale,
            input_batch=stage.input_batch,
            input_node=stage.input_node,
            output_node=stage.output_node,
            weight_bytes=stage.weight_bytes,
        )
        for stage in manifest.stages
    ]
