"""What a backend loads (`StageFiles`), and from a manifest and the places of its files to it.

A worker reads these records at its start: nothing here knows how slices are cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardwise.records import Record
from shardwise.shards.manifest import Manifest, StageSlice


class StageFiles(Record):
    """The files of one stage and how its input must be fed."""

    start: int
    end: int
    num_layers: int  # of the whole model
    weights: str  # path; the first part of a split file
    embedding: str | None  # path of a GGUF that holds token_embd.weight; only for start == 0
    architecture: str
    input_scale: float  # what the stage's input (looked-up embeddings or activations, f32) is multiplied by
    input_node: str | None  # if set: overwrite this graph node with the input, because llama.cpp changes its input first
    input_batch: str = "embeddings"  # or "tokens": the batch holds token 0 in every row, the input goes to `input_node`
    output_node: str  # graph node that holds the last layer's output, rows x hidden size in f32
    weight_bytes: int  # of the tensors in `weights`
    vocab_size: int = 0  # last stage: rows of the head, so that the vocabulary need not be read to know them; 0 = it must


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
        vocab_size=_vocab_size(stage) if stage.end == manifest.num_layers else 0,
    )


def _vocab_size(stage: StageSlice) -> int:
    shapes = {piece.shape for file in stage.files for piece in file.pieces if piece.name == "token_embd.weight"}
    return next(iter(shapes))[1] if len(shapes) == 1 else 0
