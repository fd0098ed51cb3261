"""From a manifest and the places of its files to what a backend loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardwise.shards.manifest import Manifest, StageSlice
from shardwise.shards.slicing import StageFiles


def paths_of(stage: StageSlice, paths: tuple[str, ...]) -> dict[str, Path]:
    """Name -> path, where the files lie anywhere; `paths` in the order of `stage.files`."""
    return {file.name: Path(path) for file, path in zip(stage.files, paths, strict=True)}


def stage_files(manifest: Manifest, index: int, paths: Mapping[str, Path]) -> StageFiles:
    """What the backend of stage `index` needs."""
    stage = manifest.stages[index]
    return StageFiles(
        start=stage.start,
        end=stage.end,
        num_layers=manifest.num_layers,
        weights=str(paths[stage.weights]),
        embedding=str(paths[stage.embedding]) if stage.embedding else None,
        architecture=manifest.architecture,
        input_scale=stage.input_scale,
        input_batch=stage.input_batch,
        input_node=stage.input_node,
        output_node=stage.output_node,
        weight_bytes=stage.weight_bytes,
    )
