"""What `slice_model` writes, skips and refuses."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.errors import MalformedModelError, ModelError, ShardwiseError, UnsupportedModelError, UsageError
from shardwise.shards import gguf_writer
from shardwise.shards.slicing import slice_model
from tests.shards.slicing.conftest import MakeTiny
from tests.shards.slicing.harness import chain_logits, cut, largest_difference, reference_logits
from tests.tiny_models import make_tiny


def tensors(path: str | Path) -> dict[str, gguf.ReaderTensor]:
    return {t.name: t for t in gguf.GGUFReader(path).tensors}


def value(path: str | Path, key: str) -> object:
    field = gguf.GGUFReader(path).get_field(key)
    return None if field is None else field.contents()


def test_a_middle_slice_holds_its_layers_and_no_vocabulary(tiny: MakeTiny, tmp_path: Path) -> None:
    files = slice_model(tiny("llama"), 1, 3, tmp_path)
    own, whole = tensors(files.weights), tensors(tiny("llama"))
    layers = {name for name in own if name.startswith("blk.")}
    assert layers == {name.replace("blk.1.", "blk.0.") for name in whole if name.startswith("blk.1.")} | {
        name.replace("blk.2.", "blk.1.") for name in whole if name.startswith("blk.2.")
    }
    assert set(own) - layers == {"token_embd.weight", "output_norm.weight"}
    assert list(own["token_embd.weight"].shape) == [256, 1]
    for name in layers:
        index, rest = name.removeprefix("blk.").split(".", 1)
        assert np.array_equal(own[name].data, whole[f"blk.{int(index) + 1}.{rest}"].data)
    assert value(files.weights, "llama.block_count") == 2
    assert value(files.weights, "tokenizer.ggml.model") == "no_vocab"
    assert value(files.weights, "tokenizer.ggml.tokens") is None
    assert value(files.weights, "llama.rope.freq_base") == value(tiny("llama"), "llama.rope.freq_base")
    assert files.embedding is None
    assert files.weight_bytes == sum(t.n_bytes for t in own.values())
    assert (files.output_node, files.num_layers, files.input_scale) == ("l_out-1", 4, 1.0)


def test_the_first_slice_has_its_embedding_in_a_file_of_its_own(tiny: MakeTiny, tmp_path: Path) -> None:
    files = slice_model(tiny("llama"), 0, 2, tmp_path)
    assert files.embedding is not None
    embedding = tensors(files.embedding)
    assert list(embedding) == ["token_embd.weight"]
    assert np.array_equal(embedding["token_embd.weight"].data, tensors(tiny("llama"))["token_embd.weight"].data)


def test_the_last_slice_carries_the_head_once(tiny: MakeTiny, tmp_path: Path) -> None:
    """An untied head takes the place of the unused embedding."""
    files = slice_model(tiny("llama"), 2, 4, tmp_path)
    own, whole = tensors(files.weights), tensors(tiny("llama"))
    assert "output.weight" not in own
    assert np.array_equal(own["token_embd.weight"].data, whole["output.weight"].data)
    assert value(files.weights, "tokenizer.ggml.tokens") == value(tiny("llama"), "tokenizer.ggml.tokens")


def test_a_whole_model_is_used_as_it_lies(tiny: MakeTiny, tmp_path: Path) -> None:
    files = slice_model(tiny("gemma3"), 0, 8, tmp_path / "never made")
    assert files.weights == files.embedding == str(tiny("gemma3"))
    assert files.input_scale == pytest.approx(288**0.5)
    assert not (tmp_path / "never made").exists()


def test_per_layer_metadata_is_cut(tmp_path: Path, tiny: MakeTiny) -> None:
    slices = cut(tiny("gemma3"), [3], 8, tmp_path)
    key = "gemma3.attention.sliding_window_pattern"
    assert value(slices[0].weights, key) == [True, True, True]
    assert value(slices[1].weights, key) == [True, True, False, True, True]


def test_work_that_is_there_is_skipped(tiny: MakeTiny, tmp_path: Path) -> None:
    first = slice_model(tiny("llama"), 0, 2, tmp_path)
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    calls: list[tuple[int, int]] = []
    assert slice_model(tiny("llama"), 0, 2, tmp_path, progress=lambda done, total: calls.append((done, total))) == first
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before
    assert calls == []


def test_another_split_reuses_the_embedding(tiny: MakeTiny, tmp_path: Path) -> None:
    path = slice_model(tiny("llama"), 0, 2, tmp_path).embedding
    assert path is not None
    before = os.stat(path).st_mtime_ns
    assert slice_model(tiny("llama"), 0, 3, tmp_path).embedding == path
    assert os.stat(path).st_mtime_ns == before


def test_a_touched_slice_is_verified_by_its_digest(tiny: MakeTiny, tmp_path: Path) -> None:
    """Another time with the same bytes is kept; other bytes are written anew."""
    path = Path(slice_model(tiny("llama"), 1, 3, tmp_path).weights)
    good = path.read_bytes()
    os.utime(path, ns=(1, 1))
    slice_model(tiny("llama"), 1, 3, tmp_path)
    assert path.stat().st_mtime_ns == 1
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    slice_model(tiny("llama"), 1, 3, tmp_path)
    assert path.read_bytes() == good


def test_a_changed_source_is_cut_again(tiny: MakeTiny, tmp_path: Path) -> None:
    source = tmp_path / "model.gguf"
    shutil.copy(tiny("llama"), source)
    path = Path(slice_model(source, 1, 3, tmp_path / "out").weights)
    before = path.read_bytes()
    shutil.copy(tiny("llama", "Q8_0"), source)
    slice_model(source, 1, 3, tmp_path / "out")
    assert path.read_bytes() != before


def test_progress_counts_every_byte(tiny: MakeTiny, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    files = slice_model(tiny("llama"), 0, 2, tmp_path, progress=lambda done, total: calls.append((done, total)))
    size = os.path.getsize(files.weights) + os.path.getsize(files.embedding or "")
    assert calls[-1] == (size, size)
    assert calls == sorted(calls)


def test_no_more_than_one_piece_is_held_in_memory(tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pieces of 64 KiB, no read is larger than a piece."""
    monkeypatch.setattr(gguf_writer, "COPY_BYTES", 64 << 10)
    calls = [0]
    slice_model(tiny("llama"), 0, 2, tmp_path, progress=lambda done, _: calls.append(done))
    header_bytes = calls[1]
    assert header_bytes < 64 << 10
    assert max(b - a for a, b in pairwise(calls) if b > a) <= 64 << 10


@pytest.mark.skipif(sys.platform == "win32", reason="rlimits are POSIX")
def test_a_full_disk_leaves_nothing_behind(tiny: MakeTiny, tmp_path: Path) -> None:
    """The write fails half way (a file size limit stands in for a full disk): one clear error, no file."""
    import resource
    import signal

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(UsageError, match="cannot write") as caught:
            slice_model(tiny("llama"), 1, 3, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert os.strerror(errno.EFBIG) in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_refused_before_writing(tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(UsageError, match=r"not enough disk space: .* bytes .* needed, 1000 bytes") as caught:
        slice_model(tiny("llama"), 1, 3, tmp_path)
    assert caught.value.details["needed_bytes"] > 1_000_000
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_refused(tiny: MakeTiny, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        slice_model(tiny("llama"), 1, 3, tmp_path / "file" / "out")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_a_read_only_directory_is_refused(tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so the question itself is answered with no."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match="cannot write: not writable"):
        slice_model(tiny("llama"), 1, 3, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 2), (3, 2), (0, 5), (4, 5)])
def test_ranges_outside_the_model_are_refused(start: int, end: int, tiny: MakeTiny, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="model of 4 layers"):
        slice_model(tiny("llama"), start, end, tmp_path)


def test_an_unproved_architecture_is_refused_by_name(tiny: MakeTiny, tmp_path: Path) -> None:
    data = tiny("llama").read_bytes()
    path = tmp_path / "mamba.gguf"
    assert data.count(b"\x05\0\0\0\0\0\0\0llama") == 1
    path.write_bytes(data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1))
    with pytest.raises(UnsupportedModelError, match="'mamba'") as caught:
        slice_model(path, 0, 2, tmp_path)
    assert "llama" in caught.value.hint


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model file"):
        slice_model(tmp_path / "no.gguf", 0, 1, tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 20, 1000, 20_000, -1])
def test_a_truncated_file_is_refused(keep: int, tiny: MakeTiny, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny("llama").read_bytes()[:keep])
    with pytest.raises(MalformedModelError):
        slice_model(path, 0, 2, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_leftovers_of_killed_processes_are_removed(tiny: MakeTiny, tmp_path: Path) -> None:
    """Only old ones of processes that are gone: a young file may be another machine's, in a shared folder."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(timeout=60)
    name = f"{tiny('llama').stem}.layers-1-3.gguf"
    old, young, living = (tmp_path / f".{name}.{pid}.ab{i}.part" for i, pid in enumerate((ended.pid, ended.pid, os.getpid())))
    for path in (old, young, living):
        path.write_bytes(b"half")
    for path in (old, living):
        os.utime(path, (1, 1))
    slice_model(tiny("llama"), 1, 3, tmp_path)
    assert [path.exists() for path in (old, young, living)] == [False, True, True]


def test_a_layer_without_tensors_is_refused(tiny: MakeTiny, tmp_path: Path) -> None:
    data = tiny("llama").read_bytes()
    path = tmp_path / "gap.gguf"
    path.write_bytes(data.replace(b"blk.2.", b"blk.3x"))
    with pytest.raises(MalformedModelError, match="layer 2 of 4 has no tensors"):
        slice_model(path, 1, 3, tmp_path / "out")


@pytest.mark.parametrize("layers", [0, 2**32 - 1])
def test_a_layer_count_that_lies_is_refused(layers: int, tmp_path: Path) -> None:
    """Found by fuzzing: 2^32 layers filled the memory with places to cut."""
    path = make_tiny("llama", path=tmp_path / "lie.gguf", block_count=layers)
    with pytest.raises(MalformedModelError, match=f"claims {layers} layers"):
        slice_model(path, 0, 2, tmp_path / "out")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, 60_000), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4))
def test_no_damage_to_a_header_gives_anything_but_one_clear_error(
    edits: list[tuple[int, bytes]], tiny: MakeTiny, tmp_path: Path
) -> None:
    data = bytearray(tiny("gemma3", "Q8_0", 7).read_bytes())
    header_bytes = gguf.GGUFReader(tiny("gemma3", "Q8_0", 7)).data_offset
    for position, replacement in edits:
        place = position % header_bytes
        data[place : place + len(replacement)] = replacement
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with contextlib.suppress(ShardwiseError):
        slice_model(path, 0, 3, tmp_path / "out")


def split(path: Path, folder: Path) -> list[Path]:
    """The same model in two parts, as `llama-gguf-split` writes them: metadata in the first, tensors in both."""
    reader = gguf.GGUFReader(path)
    header_end = reader.tensors[0].field.offset
    head = bytes(reader.data[24:header_end])
    paths = [folder / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for number, part in enumerate(paths):
        chosen = reader.tensors[number::2]
        total = len(reader.tensors)
        extra = [("split.no", 2, "<H", number), ("split.count", 2, "<H", 2), ("split.tensors.count", 5, "<i", total)]
        pairs = b"".join(
            struct.pack("<Q", len(k)) + k.encode() + struct.pack("<I", t) + struct.pack(f, v) for k, t, f, v in extra
        )
        own = head if number == 0 else b""
        count = len(extra) + (len(reader.fields) - 3 if number == 0 else 0)
        infos, blobs, offset = b"", b"", 0
        for t in chosen:
            data = t.data.tobytes()
            dims = [int(d) for d in t.shape]
            infos += struct.pack("<Q", len(t.name)) + t.name.encode() + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
            infos += struct.pack("<IQ", int(t.tensor_type), offset)
            blob = data + bytes(-len(data) % 32)
            blobs, offset = blobs + blob, offset + len(blob)
        start = struct.pack("<4sIQQ", b"GGUF", 3, len(chosen), count) + own + pairs + infos
        part.write_bytes(start + bytes(-len(start) % 32) + blobs)
    return paths


def test_a_model_in_parts_gives_the_same_slices(tiny: MakeTiny, tmp_path: Path) -> None:
    parts = split(tiny("llama"), tmp_path)
    expected = reference_logits(tiny("llama"))
    for cuts in ([], [1]):
        actual = chain_logits(cut(parts[0], cuts, 4, tmp_path / "out"))
        assert largest_difference(expected, actual) == 0.0


def test_a_missing_part_is_named(tiny: MakeTiny, tmp_path: Path) -> None:
    parts = split(tiny("llama"), tmp_path)
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"1 of 2 parts .* missing, first m-00002-of-00002\.gguf"):
        slice_model(parts[0], 0, 2, tmp_path / "out")
