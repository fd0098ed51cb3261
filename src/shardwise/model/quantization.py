"""How weights are stored: sizes of every block format, as data.

GGUF's formats come from the `gguf` package (so that an upgrade brings new ones); Hugging Face's dtypes and the two
formats of bitsandbytes are added here. Nothing is dequantized in this module.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from shardwise.errors import MalformedModelError, UnsupportedModelError
from shardwise.model.description import Quantization
from shardwise.partial_import import import_alone

# safetensors' names where they differ from ggml's; scales of scaled formats are tensors of their own in such files.
HUGGING_FACE = {
    "F64": (1, 8),
    "I64": (1, 8),
    "U64": (1, 8),
    "I32": (1, 4),
    "U32": (1, 4),
    "I16": (1, 2),
    "U16": (1, 2),
    "I8": (1, 1),
    "U8": (1, 1),
    "BOOL": (1, 1),
    "F8_E4M3": (1, 1),
    "F8_E5M2": (1, 1),
    "F8_E8M0": (1, 1),
    "F4": (2, 1),
}
# Presets only. FP8 with one f32 scale for each 128 x 128 tile (DeepSeek-V3, arXiv 2412.19437, section 3.3.2); INT8 with
# one f16 scale a row of at least 4096 (LLM.int8, arXiv 2208.07339); NF4 with one byte a block of 64 and double
# quantization of these (QLoRA, arXiv 2305.14314, section 3); GPTQ/AWQ with a f16 scale and a zero point a group of 128.
PRESET_ONLY = {
    "FP8": (16384, 16388),
    "INT8": (4096, 4098),
    "NF4": (16384, 8192 + 256 + 4),
    "INT4": (128, 64 + 2 + 1),
    "MXFP8": (32, 33),
}


@cache
def ggml_types() -> dict[int, Quantization]:
    """ggml's type numbers -> block formats."""
    return {
        int(kind): Quantization(name=kind.name, block_elements=elements, block_bytes=size)
        for kind, (elements, size) in _constants().GGML_QUANT_SIZES.items()
    }


@cache
def quantizations() -> dict[str, Quantization]:
    """Every known block format by its upper-case name."""
    known = {q.name: q for q in ggml_types().values()}
    for name, (elements, size) in (HUGGING_FACE | PRESET_ONLY).items():
        known.setdefault(name, Quantization(name=name, block_elements=elements, block_bytes=size))
    return known


def quantization(name: str) -> Quantization:
    """The format called `name` (any case); `UnsupportedModelError` lists the known ones."""
    known = quantizations()
    try:
        return known[name.upper()]
    except KeyError:
        raise UnsupportedModelError(
            f"the quantization '{name}' is unknown", hint=f"known are {', '.join(sorted(known))}"
        ) from None


def tensor_bytes(shape: tuple[int, ...], kind: Quantization) -> int:
    """Bytes of a tensor whose fastest dimension comes first; `MalformedModelError` where its rows are no whole blocks."""
    row = shape[0] if shape else 1
    if row % kind.block_elements:
        raise MalformedModelError(f"rows of {row} weights cannot be {kind.name}, which stores {kind.block_elements} at a time")
    count = 1
    for size in shape:
        count *= size
    return count // kind.block_elements * kind.block_bytes


@cache
def file_type_labels() -> dict[int, str]:
    """GGUF's `general.file_type` -> the label people use (`Q4_K_M`)."""
    types = _constants().LlamaFileType
    return {int(kind): kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in types if kind.name != "GUESSED"}


def _constants() -> Any:
    """`gguf.constants`, when first asked for: its enumerations cost 10 ms, which `--help` must not pay."""
    return import_alone("gguf", "constants")
