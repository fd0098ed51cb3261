"""Whatever a file holds, the reader describes it or says in one line why not.

Three ways to damage a file: bytes (flips, cuts, insertions), 8-byte fields replaced by values that break arithmetic,
and whole metadata values of the wrong type or size. What was found is kept in `FOUND` below.
"""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shardwise.errors import ModelError
from shardwise.model import ModelDescription, read_gguf_header
from shardwise.model.gguf import describe_sources
from shardwise.model.summary import describe_as_data, group_layers
from shardwise.records import to_json
from tests.model.gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U32,
    U64,
    GgufFile,
    Tensor,
    llama_keys,
    llama_tensors,
    small_llama,
)
from tests.model.memory_file import MemoryFile
from tests.tiny_models import SPECS, make_tiny

QUICK = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
HONEST = small_llama().build()
HEADER_BYTES = len(small_llama().header())
EVIL = (0, 1, 2, 7, 31, 33, 127, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 48, 1 << 60, (1 << 63) - 1)
EVIL_64 = (*EVIL, 1 << 63, (1 << 64) - 1)


def _read(data: bytes) -> tuple[ModelDescription | None, str]:
    try:
        return describe_sources([MemoryFile(data)], reference="memory.gguf"), ""
    except ModelError as error:
        return None, str(error)


def check(data: bytes) -> None:
    """The property: a description that can be shown, or one line."""
    model, line = _read(data)
    assert "\n" not in line
    assert len(line) < 2000
    if model is None:
        return
    to_json(describe_as_data(model))
    group_layers(model)
    assert model.stage_weight_bytes(0, model.num_layers) <= len(data)


def test_the_honest_file_is_described() -> None:
    model = describe_sources([MemoryFile(HONEST)], reference="memory.gguf")
    assert (model.num_layers, model.hidden_size, model.vocab_size) == (2, 32, 4)


@QUICK
@given(st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(0, 7)), min_size=1, max_size=8))
def test_flipped_bits(flips: list[tuple[int, int]]) -> None:
    data = bytearray(HONEST)
    for position, bit in flips:
        data[position] ^= 1 << bit
    check(bytes(data))


@QUICK
@given(st.integers(0, HEADER_BYTES - 8), st.sampled_from(EVIL_64), st.sampled_from(["<I", "<Q"]))
def test_evil_numbers_anywhere(position: int, number: int, form: str) -> None:
    size = struct.calcsize(form)
    packed = struct.pack(form, number & ((1 << 8 * size) - 1))
    check(HONEST[:position] + packed + HONEST[position + size :])


@QUICK
@given(st.integers(0, len(HONEST)), st.integers(0, 64), st.binary(max_size=64))
def test_parts_cut_out_and_put_in(position: int, removed: int, inserted: bytes) -> None:
    check(HONEST[:position] + inserted + HONEST[position + removed :])


@QUICK
@given(st.binary(max_size=300))
@example(b"GGUF")
@example(b"GGUF\x03\0\0\0")
def test_noise_behind_the_magic(noise: bytes) -> None:
    check(noise)
    check(b"GGUF\x03\0\0\0" + noise)


_numbers = st.sampled_from(EVIL) | st.integers(0, 200)
_values = st.one_of(
    st.tuples(st.just(U64), _numbers),
    st.tuples(st.just(U32), _numbers.map(lambda n: n & 0xFFFFFFFF)),
    st.tuples(st.just(I32), st.integers(-(1 << 31), (1 << 31) - 1)),
    st.tuples(st.just(F32), st.floats(width=32)),
    st.tuples(st.just(BOOL), st.booleans()),
    st.tuples(st.just(STRING), st.text(max_size=12)),
    st.tuples(st.just(ARRAY), st.tuples(st.just(U64), st.lists(_numbers, max_size=4))),
    st.tuples(st.just(ARRAY), st.tuples(st.just(BOOL), st.lists(st.booleans(), max_size=4))),
    st.tuples(st.just(ARRAY), st.tuples(st.just(STRING), st.lists(st.text(max_size=3), max_size=4))),
)
_ARCHITECTURES = (
    "llama",
    "gemma3",
    "deepseek2",
    "gpt-oss",
    "llama4",
    "mamba2",
    "qwen3next",
    "rwkv7",
    "lfm2",
    "gemma3n",
    "clip",
    "",
)
_KEYS = (
    "block_count",
    "context_length",
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.key_length_mla",
    "attention.kv_lora_rank",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.shared_kv_layers",
    "expert_count",
    "expert_used_count",
    "expert_shared_count",
    "nextn_predict_layers",
    "rope.dimension_count",
    "ssm.conv_kernel",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.group_count",
    "shortconv.l_cache",
    "wkv.head_size",
    "kda.head_dim",
)
_PLAIN_KEYS = (
    "general.name",
    "general.type",
    "general.file_type",
    "general.alignment",
    "split.count",
    "split.no",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.chat_template",
)
_layer_tensors = st.sampled_from(
    [
        "blk.0.ssm_out.weight",
        "blk.1.ffn_up_exps.weight",
        "blk.0.ffn_up_shexp.weight",
        "blk.1.attn_kv_a_mqa.weight",
        "rope_freqs.weight",
    ]
)


@settings(QUICK, max_examples=800)
@given(
    st.sampled_from(_ARCHITECTURES),
    st.dictionaries(st.sampled_from(_KEYS), _values, max_size=6),
    st.dictionaries(st.sampled_from(_PLAIN_KEYS), _values, max_size=3),
    st.lists(st.tuples(_layer_tensors, st.lists(st.sampled_from([1, 32, 64, 1 << 20]), max_size=4)), max_size=3),
)
def test_facts_that_make_no_sense(
    architecture: str, keys: dict[str, Any], plain: dict[str, Any], extra: list[tuple[str, list[int]]]
) -> None:
    metadata = {k.replace("llama.", f"{architecture}.", 1): v for k, v in llama_keys(2).items()}
    metadata["general.architecture"] = (STRING, architecture)
    metadata |= {f"{architecture}.{name}": content for name, content in keys.items()} | plain
    tensors = llama_tensors(2) + [Tensor(name, tuple(shape)) for name, shape in dict(extra).items()]
    check(GgufFile(keys=metadata, tensors=tensors).build())


def _with(**changes: tuple[int, Any]) -> bytes:
    return GgufFile(keys=llama_keys(2, **{k.replace("__", "."): v for k, v in changes.items()}), tensors=llama_tensors(2)).build()


FOUND = {
    "39 million key heads made `describe` look for their divisors": _with(llama__attention__head_count_kv=(I32, 39375740)),
    "a key of 20,000 letters came back in the message": _with(**{"k" * 20_000: (99, None)}),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_fuzzing_found(name: str) -> None:
    check(FOUND[name])


@pytest.mark.soak
@pytest.mark.parametrize("name", list(SPECS)[::6])
def test_mutations_of_real_headers(name: str, tmp_path: Path) -> None:
    """500 files, each with a few fields or bits of a real model's header changed."""
    path = make_tiny(name, "F16", path=tmp_path / "tiny.gguf")
    data, header_bytes = path.read_bytes(), read_gguf_header(path).data_offset_bytes
    rng = random.Random(name)
    for _ in range(500):
        damaged = bytearray(data)
        first = rng.choice([0, max(0, header_bytes - 4000)])  # anywhere, or among the tensors
        for _ in range(rng.randint(1, 6)):
            position = rng.randrange(first, header_bytes)
            if rng.random() < 0.6:
                damaged[position] ^= 1 << rng.randrange(8)
            else:
                damaged[position : position + 8] = rng.choice(EVIL_64).to_bytes(8, "little")
        check(bytes(damaged))
