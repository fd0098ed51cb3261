"""Cuts one stage out of a GGUF model into a file of its own that llama.cpp loads.

In: a `.gguf` path (the first part of a split one), layers [start, end), a directory. Out: `StageFiles`. Tensors are
copied piece by piece; a file appears under its name only when it is whole and on the disk; work that is already there
and unchanged is skipped. A whole model (start 0, end n) is used as it lies, nothing is copied.

Fails when: the architecture is not proved (`UnsupportedModelError`); the range or the cut is not allowed, the disk has
too little space (checked before anything is written) or the directory cannot be written (`UsageError`); the source is
not a readable GGUF (`MalformedModelError`). Where the directory is removed meanwhile the work is done once more.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shardwise.errors import UnsupportedModelError, UsageError
from shardwise.model.families import (
    ATTENTION,
    DEEPSTACK,
    RECURRENT,
    REFUSED_KEYS,
    REFUSED_WITHOUT_TOKENS,
    Family,
    cut_points,
    require_proved,
    slice_problem,
)
from shardwise.records import Record, from_json, to_json
from shardwise.shards.gguf_source import GgufSource
from shardwise.shards.gguf_writer import (
    OutTensor,
    encode_header,
    file_bytes,
    make_directory,
    require_space,
    write_file,
)
from shardwise.shards.slice_recipe import (
    EMBEDDING,
    NEXTN,
    RECURRENT_KEY,
    embedding_entries,
    embedding_tensors,
    layer_kinds,
    slice_entries,
    slice_tensors,
)
from shardwise.shards.stage_paths import StageFiles

RECIPE = 1  # raised whenever the same source would give another slice
T = TypeVar("T")
Progress = Callable[[int, int], None]  # (bytes written, bytes in all)


class SliceStamp(Record):
    """Beside each written file: what it was made from, and what it was when it was finished."""

    recipe: int
    start: int
    end: int
    source_digest: str  # SHA-256 of all headers
    source_bytes: tuple[int, ...]  # of every part
    source_mtime_ns: tuple[int, ...]
    result_digest: str  # SHA-256 of the file
    result_bytes: int
    result_mtime_ns: int


class _Job:
    """One file to write."""

    def __init__(self, path: Path, layers: tuple[int, int], entries: list[bytes], tensors: list[OutTensor]) -> None:
        self.path = path
        self.layers = layers
        self.tensors = tensors
        self.header = encode_header(entries, tensors)
        self.num_bytes = file_bytes(self.header, tensors)

    @property
    def stamp_path(self) -> Path:
        return self.path.with_name(self.path.name + ".stamp.json")


def slice_model(
    gguf_path: str | Path, start: int, end: int, out_dir: str | Path, *, progress: Progress | None = None
) -> StageFiles:
    """Write the slice of layers [start, end) into `out_dir` unless it is there already.

    `progress(done_bytes, total_bytes)` is called after each piece. Errors: see the module.
    """
    directory = Path(out_dir)
    return again_if_removed(directory, lambda: _slice(gguf_path, start, end, directory, progress))


def again_if_removed(directory: Path, work: Callable[[], T]) -> T:
    """Do it; once more where the directory, or a file in it, vanished meanwhile (a cache may be emptied at any time)."""
    try:
        return work()
    except (OSError, UsageError) as error:
        if not _is_removal(error) and directory.exists():
            raise _in_words(error, directory) from error
    try:
        return work()
    except (OSError, UsageError) as error:
        raise _in_words(error, directory) from error


def _in_words(error: OSError | UsageError, directory: Path) -> UsageError:
    if isinstance(error, UsageError):
        return error
    hint = "was it removed meanwhile? try again" if _is_removal(error) else "choose a directory that you may write"
    return UsageError(f"cannot write the slices: {error.strerror or error}", where=str(error.filename or directory), hint=hint)


def _is_removal(error: Exception) -> bool:
    return isinstance(error, FileNotFoundError) or isinstance(error.__cause__, FileNotFoundError)


def _slice(gguf_path: str | Path, start: int, end: int, directory: Path, progress: Progress | None) -> StageFiles:
    source = GgufSource(gguf_path)
    family = require_proved(source.architecture)
    num_layers = count_layers(source)
    check_range(family, start, end, num_layers, layer_kinds(source, family, num_layers))
    if (start, end) == (0, num_layers):
        return _whole_model(source, family, num_layers)
    make_directory(directory)
    stem = source.paths[0].name.removesuffix(".gguf")
    weights = _Job(
        directory / f"{stem}.layers-{start}-{end}.gguf",
        (start, end),
        slice_entries(source, family, start, end, num_layers),
        slice_tensors(source, family, start, end, num_layers),
    )
    jobs = [weights]
    if start == 0:
        path = directory / f"{stem}.embedding.gguf"
        jobs.append(_Job(path, (0, 0), embedding_entries(source), embedding_tensors(source)))
    _write_missing(jobs, source, directory, progress)
    return stage_files(
        source,
        family,
        (start, end, num_layers),
        weights=str(weights.path),
        embedding=str(jobs[1].path) if start == 0 else None,
        weight_bytes=sum(t.num_bytes for t in weights.tensors),
    )


def count_layers(source: GgufSource) -> int:
    """Layers that compute (without those for multi-token prediction).

    `MalformedModelError` if there are none or no embedding; `UnsupportedModelError` if the file has something that
    its architecture's parity does not cover.
    """
    num_layers = source.integer("block_count") - source.integer(NEXTN, 0)
    if not 0 < num_layers <= len(source.tensors):
        raise source.header.complaint(f"the header claims {num_layers} layers, the file has {len(source.tensors)} tensors")
    if EMBEDDING not in source.tensors:
        raise source.header.complaint(f"there is no tensor '{EMBEDDING}'")
    _refuse_unproved_variants(source, require_proved(source.architecture))
    return num_layers


def _refuse_unproved_variants(source: GgufSource, family: Family) -> None:
    refused = REFUSED_KEYS if family.token_batches else REFUSED_KEYS | REFUSED_WITHOUT_TOKENS
    if family.without_rows_of_images:
        refused = refused - {DEEPSTACK}
    found = [name for name in refused if source.has(name)]
    missing = [name for name in family.needs_keys if not source.has(name)]
    values = {name: source.header.scalar(source.own_key(name)) for name in family.required_values | family.refused_values}
    other = [name for name, allowed in family.required_values.items() if values[name] not in (None, *allowed)]
    other += [name for name, not_allowed in family.refused_values.items() if values[name] in not_allowed]
    every = family.recurrent_interval
    if every and source.element_type(source.own_key(RECURRENT_KEY)) is not None:
        kinds = layer_kinds(source, family, source.integer("block_count") - source.integer(NEXTN, 0)) or []
        usual = [RECURRENT if (index + 1) % every else ATTENTION for index in range(len(kinds))]
        other += [] if kinds == usual else [RECURRENT_KEY]
    if found or missing or other:
        what = f"with '{(found or other)[0]}'" if found or other else f"without '{missing[0]}'"
        raise UnsupportedModelError(
            f"{source.architecture} models {what} are not proved to give the same logits when they are split",
            where=str(source.paths[0]),
            hint="run it with llama.cpp itself",
        )


def check_range(family: Family, start: int, end: int, num_layers: int, kinds: list[str] | None = None) -> None:
    """`UsageError` unless layers [start, end) are a part that this architecture allows."""
    problem = slice_problem(family, start, end, num_layers, kinds)
    if problem is None:
        return
    allowed = cut_points(family, num_layers)
    text = f"it may be cut before layer {', '.join(map(str, allowed))}" if allowed else "it cannot be cut at all"
    if not 0 <= start < end <= num_layers:
        text = f"0 <= start < end <= {num_layers}"
    raise UsageError(problem, where="layers", hint=text, allowed_cuts=allowed)


def _whole_model(source: GgufSource, family: Family, num_layers: int) -> StageFiles:
    return stage_files(
        source,
        family,
        (0, num_layers, num_layers),
        weights=str(source.paths[0]),
        embedding=str(source.tensors[EMBEDDING].path),
        weight_bytes=sum(t.num_bytes for t in source.tensors.values()),
    )


def stage_files(
    source: GgufSource,
    family: Family,
    layers: tuple[int, int, int],
    *,
    weights: str,
    embedding: str | None,
    weight_bytes: int,
) -> StageFiles:
    """What the stage worker needs to know; `layers` is (start, end, layers of the model)."""
    start, end, num_layers = layers
    hidden_size = source.integer("embedding_length")
    return StageFiles(
        start=start,
        end=end,
        num_layers=num_layers,
        weights=weights,
        embedding=embedding,
        architecture=source.architecture,
        input_scale=math.sqrt(hidden_size) if family.scales_input and start == 0 else 1.0,
        input_node=_input_node(family, start),
        input_batch="tokens" if family.token_batches else "embeddings",
        output_node=f"{family.output_node}-{end - start - 1}",
        weight_bytes=weight_bytes,
        vocab_size=source.tensors[EMBEDDING].shape[1] if end == num_layers else 0,
    )


def _input_node(family: Family, start: int) -> str | None:
    if start > 0:
        return family.input_node
    return (family.first_input_node or family.input_node) if family.token_batches else None


def _write_missing(jobs: list[_Job], source: GgufSource, directory: Path, progress: Progress | None) -> None:
    missing = [job for job in jobs if not _is_there(job, source)]
    total_bytes = sum(job.num_bytes for job in missing)
    require_space(directory, total_bytes)
    done_bytes = 0

    def on_bytes(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        if progress is not None:
            progress(done_bytes, total_bytes)

    for job in missing:
        digest = write_file(job.path, job.header, job.tensors, on_bytes)
        stat = job.path.stat()
        stamp = _stamp(job, source, digest, stat.st_size, stat.st_mtime_ns)
        write_file(job.stamp_path, to_json(stamp), [])


def _stamp(job: _Job, source: GgufSource, digest: str, num_bytes: int, mtime_ns: int) -> SliceStamp:
    stats = [path.stat() for path in source.paths]
    return SliceStamp(
        recipe=RECIPE,
        start=job.layers[0],
        end=job.layers[1],
        source_digest=source.header_digest,
        source_bytes=tuple(s.st_size for s in stats),
        source_mtime_ns=tuple(s.st_mtime_ns for s in stats),
        result_digest=digest,
        result_bytes=num_bytes,
        result_mtime_ns=mtime_ns,
    )


def _is_there(job: _Job, source: GgufSource) -> bool:
    """Same source, same recipe, and the file is what was written: by size and time, or else by its digest."""
    try:
        found = from_json(job.stamp_path.read_bytes(), SliceStamp)
        stat = job.path.stat()
    except (OSError, UsageError):
        return False
    wanted = _stamp(job, source, found.result_digest, found.result_bytes, found.result_mtime_ns)
    if wanted != found or stat.st_size != found.result_bytes:
        return False
    return stat.st_mtime_ns == found.result_mtime_ns or _sha256(job.path) == found.result_digest


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
