"""The token embedding's rows are what gguf's numpy code gives, to the bit, for every type of weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from shardwise.errors import UsageError
from shardwise.stage.llama.dequantize import MatrixRows
from shardwise.stage.llama.embedding import TokenEmbedding

TYPES = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]


@pytest.mark.parametrize("name", TYPES)
def test_rows_are_equal_to_the_bit(name: str) -> None:
    kind = GGMLQuantizationType[name]
    block, size = GGML_QUANT_SIZES[kind]
    columns = 2 * block if block > 1 else 64
    random = np.random.default_rng(7)
    matrix = random.integers(0, 256, (50, columns // block * size), dtype=np.uint8)
    numbers = np.array([0, 49, 3, 3, 17], dtype=np.int32)
    with np.errstate(all="ignore"):  # random bytes hold infinities and NaNs too
        wanted = np.ascontiguousarray(dequantize(matrix[numbers], kind), dtype=np.float32)
    got = MatrixRows(matrix, int(kind), columns).take(numbers.tolist())
    assert got.shape == (5, columns)
    finite = np.isfinite(wanted)
    assert finite.mean() > 0.5
    assert np.array_equal(got.view(np.uint32)[finite], wanted.view(np.uint32)[finite])


def test_plain_floats() -> None:
    matrix = np.arange(12, dtype=np.float32).reshape(4, 3)
    assert np.array_equal(MatrixRows(matrix, 0, 3).take([2, 0]), matrix[[2, 0]])


def test_the_sample(sample_gguf: Path) -> None:
    tensor = next(t for t in GGUFReader(str(sample_gguf)).tensors if t.name == "token_embd.weight")
    numbers = np.array([0, 1, 49151, 777], dtype=np.int32)
    wanted = dequantize(np.ascontiguousarray(tensor.data[numbers]), tensor.tensor_type)
    assert np.array_equal(TokenEmbedding(str(sample_gguf)).lookup(numbers), wanted)


def test_an_id_beyond_the_vocabulary(sample_gguf: Path) -> None:
    with pytest.raises(UsageError, match="outside"):
        TokenEmbedding(str(sample_gguf)).lookup(np.array([49152], dtype=np.int32))
