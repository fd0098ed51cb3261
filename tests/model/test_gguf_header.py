"""The reader against the `gguf` package on a real file, and against files that lie."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from shardwise.errors import MalformedModelError, ModelError, UnsupportedModelError
from shardwise.model import describe_gguf, read_gguf_header, sample_path
from shardwise.model.gguf import describe_sources
from shardwise.model.gguf_header import GgufArray
from tests.model.gguf_bytes import ARRAY, BOOL, F32, I32, STRING, U32, U64, GgufFile, Tensor, small_llama
from tests.model.memory_file import MemoryFile


def test_equals_the_gguf_package_on_a_real_file() -> None:
    header = read_gguf_header(sample_path())
    reference = gguf.GGUFReader(sample_path())
    assert header.data_offset_bytes == reference.data_offset
    fields = {name: f for name, f in reference.fields.items() if not name.startswith("GGUF.")}
    assert set(header.metadata) == set(fields)
    for name, field in fields.items():
        expected = field.contents()
        value = header.metadata[name].value
        actual = header.array(name) if isinstance(value, GgufArray) else value
        assert actual == expected, name
    for ours, theirs in zip(header.tensors, reference.tensors, strict=True):
        assert (ours.name, list(ours.shape)) == (theirs.name, theirs.shape.tolist())
        assert (ours.offset_bytes, ours.num_bytes) == (theirs.data_offset, theirs.n_bytes)
        assert ours.quantization == theirs.tensor_type.name


def test_raw_is_what_stands_in_the_file(tmp_path: Path) -> None:
    path = small_llama().write(tmp_path / "m.gguf")
    header = read_gguf_header(path)
    assert header.raw("general.name") == struct.pack("<Q", 5) + b"small"
    assert header.raw("llama.block_count") == struct.pack("<I", 2)
    assert header.array("tokenizer.ggml.tokens") == ["a", "b", "c", "d"]


def test_a_vocabulary_of_150_000_is_quick(tmp_path: Path) -> None:
    file = small_llama()
    file.keys["tokenizer.ggml.tokens"] = (ARRAY, (STRING, [f"token{i}" for i in range(150_000)]))
    file.keys["tokenizer.ggml.merges"] = (ARRAY, (STRING, [f"to ken{i}" for i in range(300_000)]))
    path = file.write(tmp_path / "m.gguf")
    read_gguf_header(sample_path())  # imports
    started = time.perf_counter()
    header = read_gguf_header(path)
    assert time.perf_counter() - started < 1.0
    assert header.array("tokenizer.ggml.merges")[-1] == "to ken299999"


Change = Callable[[GgufFile], Any]


def _key(name: str, kind: int, content: Any) -> Change:
    return lambda file: file.keys.update({name: (kind, content)})


def _without(name: str) -> Change:
    return lambda file: file.keys.pop(name)


def _set(**fields: Any) -> Change:
    return lambda file: [setattr(file, name, content) for name, content in fields.items()]


def _tensor(index: int, **fields: Any) -> Change:
    return lambda file: [setattr(file.tensors[index], name, content) for name, content in fields.items()]


LIES: dict[str, tuple[Change, str]] = {
    "magic": (_set(magic=b"GGML"), "not a GGUF file"),
    "tensor count of 2^60": (_set(num_tensors=1 << 60), "claims 1152921504606846976 tensors"),
    "key count of 2^60": (_set(num_keys=1 << 60), "claims 1152921504606846976 metadata keys"),
    "one key too many": (_set(num_keys=14), ""),
    "one tensor too many": (_set(num_tensors=17), ""),
    "negative dimension": (_tensor(0, shape=(32, -4)), "claims the shape [32, -4]"),
    "zero dimension": (_tensor(0, shape=(0, 4)), "claims the shape [0, 4]"),
    "huge dimension": (_tensor(0, shape=(32, 1 << 58)), "ends at byte"),
    "product beyond 2^64": (_tensor(0, shape=(1 << 40, 1 << 40)), "ends at byte"),
    "five dimensions": (_tensor(0, shape=(32, 1, 1, 1, 1)), "claims 5 dimensions"),
    "half a block": (_tensor(0, shape=(33, 4)), "rows of 33 weights"),
    "offset beyond the end": (_tensor(1, offset=1 << 40), "is not complete"),
    "offset not aligned": (_tensor(1, offset=8), "no multiple of 32"),
    "overlap": (_tensor(1, offset=0), "overlap"),
    "same tensor twice": (_tensor(1, name="token_embd.weight"), "repeats the name"),
    "tensor without a name": (_tensor(1, name=""), "has no name"),
    "alignment of 3": (_key("general.alignment", U32, 3), "power of two"),
    "alignment of 0": (_key("general.alignment", U32, 0), "power of two"),
    "alignment as text": (_key("general.alignment", STRING, "32"), "power of two"),
    "alignment too large": (_key("general.alignment", U32, 1 << 31), "power of two"),
    "array of arrays": (_key("x", ARRAY, (ARRAY, [(U32, [1])])), "array of arrays"),
    "empty key": (_key("", U32, 1), "is empty"),
    "no architecture": (_without("general.architecture"), "'general.architecture' is missing"),
    "architecture as number": (_key("general.architecture", U32, 1), "not a string"),
    "no layer count": (_without("llama.block_count"), "'llama.block_count' is missing"),
    "no context": (_without("llama.context_length"), "'llama.context_length' is missing"),
    "no width": (_without("llama.embedding_length"), "'llama.embedding_length' is missing"),
    "no heads": (_without("llama.attention.head_count"), "gives it no heads"),
    "negative layer count": (_key("llama.block_count", I32, -1), "no possible size"),
    "layer count as text": (_key("llama.block_count", STRING, "2"), "no possible size"),
    "layer count as truth": (_key("llama.block_count", BOOL, True), "no possible size"),
    "layer count of 2^60": (_key("llama.block_count", U64, 1 << 60), "no possible size"),
    "more layers than tensors": (_key("llama.block_count", U32, 1 << 30), "has not that many tensors"),
    "one layer too many": (_key("llama.block_count", U32, 3), "layer 2 of 3 has no tensors"),
    "one layer too few": (_key("llama.block_count", U32, 1), "beyond the 1 that exist"),
    "wrong width": (_key("llama.embedding_length", U32, 64), "embedding_length is 64"),
    "heads as numbers with a point": (_key("llama.attention.head_count", ARRAY, (F32, [2.0, 2.0])), "holds no integers"),
    "heads for too few layers": (_key("llama.attention.head_count", ARRAY, (U32, [2])), "one a layer"),
    "negative heads": (_key("llama.attention.head_count", ARRAY, (I32, [2, -2])), "one a layer"),
    "more tokens than rows": (_key("tokenizer.ggml.tokens", ARRAY, (STRING, ["a"] * 999)), "the tokenizer has 999 tokens"),
    "fewer tokens than rows": (_key("tokenizer.ggml.tokens", ARRAY, (STRING, ["a"])), "the tokenizer has 1 tokens"),
    "no embedding": (_tensor(0, name="token_bmed.weight"), "'token_embd.weight' is missing"),
    "more predicted layers than layers": (_key("llama.nextn_predict_layers", U32, 2), "multi-token prediction"),
    "a part of a split model": (_key("split.count", U32, 3), "has 3 parts, but there are 1"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_one_clear_line(name: str, tmp_path: Path) -> None:
    change, expected = LIES[name]
    file = small_llama()
    change(file)
    with pytest.raises(ModelError) as caught:
        describe_gguf(file.write(tmp_path / "m.gguf"))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in caught.value.where


UNSUPPORTED: dict[str, tuple[Change, str]] = {
    "version 1": (_set(version=1), "GGUF version 1"),
    "version 4": (_set(version=4), "GGUF version 4"),
    "big-endian": (_set(version=3 << 24), "big-endian"),
    "unknown quantization": (_tensor(0, type_id=77), "unknown quantization 77"),
    "removed quantization": (_tensor(0, type_id=31), "unknown quantization 31"),
    "vision part": (_key("general.architecture", STRING, "clip"), "vision part"),
    "encoder": (_key("general.architecture", STRING, "t5"), "encoder-decoder"),
    "adapter": (_key("general.type", STRING, "adapter"), "of type 'adapter'"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_nobody_can_compute_is_unsupported(name: str, tmp_path: Path) -> None:
    change, expected = UNSUPPORTED[name]
    file = small_llama()
    change(file)
    with pytest.raises(UnsupportedModelError) as caught:
        describe_gguf(file.write(tmp_path / "m.gguf"))
    assert expected in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_key_twice(tmp_path: Path) -> None:
    file = small_llama()
    file.keys["general.namf"] = file.keys["general.name"]
    data = file.build().replace(b"general.namf", b"general.name")
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(MalformedModelError, match=r"repeats 'general\.name'"):
        read_gguf_header(path)


def test_lengths_of_2_to_the_60_stop_at_once() -> None:
    """Each length and count of the header in turn claims 2^60."""
    honest = small_llama().build()
    for position in range(8, len(small_llama().header()) - 8):
        data = honest[:position] + struct.pack("<Q", 1 << 60) + honest[position + 8 :]
        with contextlib.suppress(ModelError):
            describe_sources([MemoryFile(data)], reference="lie.gguf")


def test_cut_off_at_every_byte() -> None:
    """Every byte of the header and of what follows; then a sample of the weights' bytes."""
    data, header_bytes = small_llama(1).build(), len(small_llama(1).header())
    for length in (*range(header_bytes + 64), *range(header_bytes + 64, len(data), 37), len(data) - 1):
        with pytest.raises(MalformedModelError) as caught:
            describe_sources([MemoryFile(data[:length])], reference="cut.gguf")
        assert "\n" not in str(caught.value)
        assert caught.value.exit_code == 2


def test_cut_off_on_disk(tmp_path: Path) -> None:
    data = small_llama(1).build()
    path = tmp_path / "m.gguf"
    for length in (0, 3, 4, 24, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(MalformedModelError) as caught:
            describe_gguf(path)
        assert caught.value.where == str(path)


def test_zeros_do_not_fill_the_memory(tmp_path: Path) -> None:
    """A sparse file of zeros whose header claims as much as it may."""
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 1 << 18, 1 << 18))
        file.truncate(1 << 36)
    with pytest.raises(MalformedModelError, match="is empty"):
        read_gguf_header(path)
    with path.open("r+b") as file:
        file.seek(24)
        file.write(struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", ARRAY, STRING, 1 << 24))
    started = time.perf_counter()
    with pytest.raises(MalformedModelError, match="claims more than 96 MiB"):
        read_gguf_header(path)
    assert time.perf_counter() - started < 20


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    for path, message in ((tmp_path, "folder"), (tmp_path / "no.gguf", "no such model file"), ("a\0b", "no such|null")):
        with pytest.raises(ModelError, match=message):
            read_gguf_header(path)


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.touch()
    with pytest.raises(MalformedModelError, match="not a GGUF file"):
        read_gguf_header(path)


def test_a_tensor_without_dimensions_is_one_number(tmp_path: Path) -> None:
    file = GgufFile(keys={"general.architecture": (STRING, "x")}, tensors=[Tensor("scale", ())])
    header = read_gguf_header(file.write(tmp_path / "m.gguf"))
    assert (header.tensors[0].shape, header.tensors[0].num_bytes) == ((), 4)
