"""What `pack` writes: the slicer's bytes, a canonical manifest, and nothing twice."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from shardwise.errors import CorruptWeightsError, ModelError, UsageError
from shardwise.model import describe_gguf, describe_model, resolve_model, sample_path
from shardwise.records import replace, to_json
from shardwise.shards.manifest import DIGEST_NAME, MANIFEST_NAME, load_manifest, parse_manifest
from shardwise.shards.packing import make_manifest, pack_model, ranges_of
from shardwise.shards.slicing import slice_model
from shardwise.shards.stage_paths import stage_files
from shardwise.shards.verify import verify_dir
from tests.shards.conftest import NUM_LAYERS, SETTINGS, write_tiny_model


@pytest.mark.parametrize("model", ["tiny", "untied"])
@pytest.mark.parametrize("counts", [[10, 12, 8], [1] * 30, [29, 1]])
def test_files_are_those_of_the_slicer_to_the_byte(
    model: str, counts: list[int], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source: Path = request.getfixturevalue(model)
    manifest = pack_model(source, counts, tmp_path / "packed", SETTINGS)
    for stage in manifest.stages:
        files = slice_model(source, stage.start, stage.end, tmp_path / "sliced")
        assert (tmp_path / "packed" / stage.weights).read_bytes() == Path(files.weights).read_bytes()
        if files.embedding is not None:
            assert stage.embedding is not None
            assert (tmp_path / "packed" / stage.embedding).read_bytes() == Path(files.embedding).read_bytes()
    for index, stage in enumerate(manifest.stages):
        files = slice_model(source, stage.start, stage.end, tmp_path / "sliced")
        packed = {file.name: tmp_path / "packed" / file.name for file in stage.files}
        assert replace(stage_files(manifest, index, packed), weights="", embedding="") == replace(files, weights="", embedding="")


def test_the_sample_model_to_the_byte(tmp_path: Path) -> None:
    manifest = pack_model(sample_path(), [10, 12, 8], tmp_path / "packed", SETTINGS)
    for stage in manifest.stages:
        files = slice_model(sample_path(), stage.start, stage.end, tmp_path / "sliced")
        assert (tmp_path / "packed" / stage.weights).read_bytes() == Path(files.weights).read_bytes()
    assert verify_dir(tmp_path / "packed") == []


def test_one_stage_is_the_model_as_it_lies(tiny: Path, tmp_path: Path) -> None:
    pack_model(tiny, [NUM_LAYERS], tmp_path, SETTINGS)
    assert (tmp_path / "tiny.gguf").read_bytes() == tiny.read_bytes()
    assert verify_dir(tmp_path) == []


def test_a_slice_is_not_taken_for_a_model(tiny: Path, tmp_path: Path) -> None:
    manifest = pack_model(tiny, [10, 20], tmp_path, SETTINGS)
    names = [file.name for stage in manifest.stages for file in stage.files]
    for path in (tmp_path, *(tmp_path / name for name in names)):
        for ask in (describe_model, resolve_model):
            with pytest.raises(UsageError, match="slice") as caught:
                ask(str(path))
            assert f"--weights-from {tmp_path}" in caught.value.hint
    pack_model(tiny, [NUM_LAYERS], tmp_path / "whole", SETTINGS)
    assert describe_model(str(tmp_path / "whole" / "tiny.gguf")).num_layers == NUM_LAYERS


def test_the_manifest_says_what_the_model_is(tiny: Path, tmp_path: Path) -> None:
    manifest = pack_model(tiny, [10, 20], tmp_path, SETTINGS)
    description = describe_gguf(tiny)
    assert manifest.revision_digest == description.revision_digest
    assert manifest.tokenizer_digest == description.tokenizer.digest
    assert manifest.layers == ((0, 10), (10, 30))
    data = tiny.read_bytes()
    tensors = [p for stage in manifest.stages for f in stage.files for p in f.pieces if p.origin]
    assert {p.origin for p in tensors} == {t.name for t in description.all_tensors()}
    for piece in tensors:
        assert piece.sha256 == hashlib.sha256(data[piece.origin_offset_bytes :][: piece.num_bytes]).hexdigest()
    assert {p.dtype for p in tensors} == {"F32"}


def test_the_digest_is_that_of_the_file(tiny: Path, tmp_path: Path) -> None:
    manifest = pack_model(tiny, [10, 20], tmp_path, SETTINGS)
    data = (tmp_path / MANIFEST_NAME).read_bytes()
    assert hashlib.sha256(data).hexdigest() == manifest.digest
    assert (tmp_path / DIGEST_NAME).read_text() == f"{manifest.digest}  {MANIFEST_NAME}\n"
    assert load_manifest(tmp_path) == load_manifest(tmp_path, expected=manifest.digest) == manifest


def test_making_the_manifest_alone_gives_the_same(tiny: Path, tmp_path: Path) -> None:
    assert make_manifest(tiny, [10, 20], SETTINGS).manifest == pack_model(tiny, [10, 20], tmp_path, SETTINGS)


@pytest.mark.parametrize("field", ["protocol_version", "wire_dtype", "context_tokens", "kv_type", "libraries"])
def test_every_setting_changes_the_digest(tiny: Path, field: str) -> None:
    other = {"protocol_version": 2, "wire_dtype": "f32", "context_tokens": 1, "kv_type": "q8_0", "libraries": (("a", "1"),)}
    one = make_manifest(tiny, [30], SETTINGS).manifest
    assert make_manifest(tiny, [30], replace(SETTINGS, **{field: other[field]})).manifest.digest != one.digest


def snapshot(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in directory.glob("*.gguf")}


def test_a_second_call_reads_and_writes_no_weight(tiny: Path, tmp_path: Path) -> None:
    first = pack_model(tiny, [10, 20], tmp_path, SETTINGS)
    before, counted = snapshot(tmp_path), []
    assert pack_model(tiny, [10, 20], tmp_path, SETTINGS, progress=lambda done, total: counted.append(done)) == first
    assert snapshot(tmp_path) == before
    assert not counted


def test_a_new_split_keeps_what_did_not_change(tiny: Path, tmp_path: Path) -> None:
    pack_model(tiny, [10, 10, 10], tmp_path, SETTINGS)
    before = snapshot(tmp_path)
    pack_model(tiny, [10, 12, 8], tmp_path, SETTINGS)
    after = snapshot(tmp_path)
    assert verify_dir(tmp_path) == []
    assert {name for name in after if before.get(name) == after[name]} == {"tiny.layers-0-10.gguf", "tiny.embedding.gguf"}
    assert sorted(after) == ["tiny.embedding.gguf", "tiny.layers-0-10.gguf", "tiny.layers-10-22.gguf", "tiny.layers-22-30.gguf"]


def test_a_touched_slice_is_written_again(tiny: Path, tmp_path: Path) -> None:
    pack_model(tiny, [10, 20], tmp_path, SETTINGS)
    victim = tmp_path / "tiny.layers-0-10.gguf"
    data = bytearray(victim.read_bytes())
    data[-100] ^= 1
    victim.write_bytes(data)
    pack_model(tiny, [10, 20], tmp_path, SETTINGS)
    assert verify_dir(tmp_path) == []


def test_another_model_of_the_same_name_is_packed_anew(tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "model" / "tiny.gguf"
    model.parent.mkdir()
    shutil.copy(tiny, model)
    first = pack_model(model, [10, 20], tmp_path / "out", SETTINGS)
    write_tiny_model(model, seed=9)
    second = pack_model(model, [10, 20], tmp_path / "out", SETTINGS)
    assert first.digest != second.digest
    assert verify_dir(tmp_path / "out") == []


def test_the_hubs_checksum_is_compared(tiny: Path, tmp_path: Path) -> None:
    """The Hub's cache names a large file by its SHA-256 and links to it."""
    blobs, snapshot_dir = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot_dir.mkdir(parents=True)
    sha256 = hashlib.sha256(tiny.read_bytes()).hexdigest()
    shutil.copy(tiny, blobs / sha256)
    (snapshot_dir / "tiny.gguf").symlink_to(blobs / sha256)
    manifest = make_manifest(snapshot_dir / "tiny.gguf", [30], SETTINGS).manifest
    assert manifest.source_files[0].sha256 == sha256
    data = bytearray((blobs / sha256).read_bytes())
    data[len(data) // 2] ^= 4
    (blobs / sha256).write_bytes(data)
    with pytest.raises(CorruptWeightsError, match="not the one that the Hub has") as caught:
        make_manifest(snapshot_dir / "tiny.gguf", [30], SETTINGS)
    assert caught.value.details["expected"] == sha256


def test_a_split_model(tmp_path: Path) -> None:
    """Tensors of one slice come from two files, and one stage is both files."""
    parts = write_split_model(tmp_path)
    for counts in ([1, 3], [4]):
        out = tmp_path / str(len(counts))
        manifest = pack_model(parts[0], counts, out, SETTINGS)
        assert verify_dir(out) == []
        if len(counts) == 1:
            assert [f.name for f in manifest.stages[0].files] == [p.name for p in parts]
            assert all((out / p.name).read_bytes() == p.read_bytes() for p in parts)
        else:
            files = slice_model(parts[0], 1, 4, tmp_path / "sliced")
            assert (out / manifest.stages[1].weights).read_bytes() == Path(files.weights).read_bytes()


def write_split_model(directory: Path) -> list[Path]:
    whole = write_tiny_model(directory / "whole.gguf", num_layers=4)
    reader = gguf.GGUFReader(str(whole))
    names = [t.name for t in reader.tensors]
    parts = []
    for number, chosen in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        path = directory / f"tiny-{number + 1:05}-of-00002.gguf"
        writer = gguf.GGUFWriter(str(path), "llama")
        if number == 0:
            for key, value in (("block_count", 4), ("context_length", 64), ("embedding_length", 32), ("feed_forward_length", 64)):
                writer.add_uint32(f"llama.{key}", value)
            writer.add_uint32("llama.attention.head_count", 4)
            writer.add_uint32("llama.attention.head_count_kv", 2)
            writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
            writer.add_tokenizer_model("llama")
            writer.add_token_list([f"t{i}" for i in range(3000)])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(names))
        for tensor in reader.tensors:
            if tensor.name in chosen:
                writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(path)
    return parts


def test_wrong_ranges() -> None:
    assert ranges_of([10, 12, 8], 30) == [(0, 10), (10, 22), (22, 30)]
    for counts in ([], [30, 0], [31], [29], [-1, 31]):
        with pytest.raises(UsageError, match="do not make up"):
            ranges_of(counts, 30)


def test_refusals_leave_nothing_behind(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="would overwrite the model"):
        pack_model(tiny, [30], tiny.parent, SETTINGS)
    with pytest.raises(ModelError):
        pack_model(tmp_path / "missing.gguf", [30], out, SETTINGS)
    assert not out.exists()


def test_a_truncated_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:-1000])
    with pytest.raises(ModelError):
        pack_model(cut, [10, 20], tmp_path / "out", SETTINGS)


def test_manifest_round_trip_in_canonical_form(tiny: Path) -> None:
    manifest = make_manifest(tiny, [10, 20], SETTINGS).manifest
    assert parse_manifest(to_json(manifest), expected=manifest.digest) == manifest
