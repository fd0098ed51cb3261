"""Writes a tiny GGUF with random weights, the same bytes every time."""

from __future__ import annotations

import dataclasses
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tests.tiny_models.catalog import SPECS
from tests.tiny_models.quantize import quantize
from tests.tiny_models.spec import Spec
from tests.tiny_models.tokenizer import add_tokenizer, vocabulary


def make_tiny(
    architecture: str, quantization: str = "F16", *, num_layers: int | None = None, path: str | Path, **keys: Any
) -> Path:
    """Write the tiny model called `architecture` (a key of `SPECS`) to `path`, unless that exists already.

    Matrices are stored in `quantization`, norms, biases, routers and rope factors in f32. `keys` replace metadata
    (dots written as `__`). A tokenizer and a chat template are in the file.
    """
    path = Path(path)
    if path.exists():
        return path
    spec = SPECS[architecture]
    if num_layers is not None:
        spec = dataclasses.replace(spec, num_layers=num_layers)
    temporary = path.with_suffix(".making")
    writer = gguf.GGUFWriter(temporary, spec.architecture)
    writer.add_name("tiny random model")  # llama.cpp guesses tokenizer habits from some names
    vocab_size = add_tokenizer(writer)
    for key, value in (spec.metadata() | {k.replace("__", "."): v for k, v in keys.items()}).items():
        _add(writer, f"{spec.architecture}.{key}", value)
    for key, value in spec.plain_keys.items():
        _add(writer, key, value)
    for name, shape in spec.tensors(vocab_size):
        weights = _weights(architecture, name, shape)
        if _is_matrix(name, shape):
            kind = gguf.GGMLQuantizationType[quantization]
            data = quantize(weights, quantization)
            writer.add_tensor(name, data, raw_dtype=kind)
        else:
            writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return temporary.replace(path)


def vocab_size() -> int:
    """Tokens of every tiny model."""
    return len(vocabulary()[0])


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """llama.cpp keeps vectors, norms and routers in f32."""
    keep = ("norm", "ffn_gate_inp", "position_embd", ".bias", "ssm_conv1d", "ssm_a", "ssm_d", "shortconv.conv")
    return len(shape) > 1 and not any(part in name for part in keep)


def _weights(model: str, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Random, of a size that keeps activations near 1; numpy's order is ggml's reversed."""
    random = np.random.default_rng(zlib.crc32(f"{model}:{name}".encode()))
    values = random.standard_normal(tuple(reversed(shape)), dtype=np.float32)
    if "norm" in name and name.endswith(".weight"):
        return 1 + np.float32(0.1) * values
    if name.endswith("ssm_a"):
        return -np.abs(values) - np.float32(0.1)  # decay rates: a state must not grow
    if "rope_f" in name:
        return 1 + np.abs(values)
    if len(shape) == 1:
        return np.float32(0.1) * values
    return values / np.float32(np.sqrt(shape[0])) if name != "token_embd.weight" else values * np.float32(0.5)


def spec_of(architecture: str) -> Spec:
    """The spec behind a name."""
    return SPECS[architecture]
