"""Every flipped bit is found and named; a record saves the second reading and is worth nothing when forged."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.errors import CorruptWeightsError
from shardwise.records import from_json, replace, to_json
from shardwise.shards.manifest import (
    DIGEST_NAME,
    MANIFEST_NAME,
    Manifest,
    SliceFile,
    StageSlice,
    check_manifest,
    load_manifest,
    parse_manifest,
)
from shardwise.shards.packing import make_manifest, pack_model
from shardwise.shards.verification import VerificationRecord, ensure_verified
from shardwise.shards.verify import Mismatch, paths_in, require_whole, verify_dir
from tests.shards.conftest import SETTINGS

KEY = b"k" * 32


@pytest.fixture
def packed(tiny: Path, tmp_path: Path) -> Path:
    pack_model(tiny, [10, 12, 8], tmp_path / "packed", SETTINGS)
    return tmp_path / "packed"


def listed_files(directory: Path) -> list[Path]:
    """What a manifest vouches for, itself included."""
    return sorted([*directory.glob("*.gguf"), directory / MANIFEST_NAME, directory / DIGEST_NAME])


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def flip_and_find(directory: Path, num_flips: int) -> None:
    """Random bits over all files, each file as likely as its size but the manifest's not less than a tenth."""
    source = random.Random(4)
    files = listed_files(directory)
    small = [p for p in files if p.suffix != ".gguf"]
    manifest = load_manifest(directory)
    by_name = {f.name: f for stage in manifest.stages for f in stage.files}
    for _ in range(num_flips):
        path = source.choice(small) if source.random() < 0.1 else source.choices(files, [p.stat().st_size for p in files])[0]
        bit = source.randrange(8 * path.stat().st_size)
        flip(path, bit)
        found = verify_dir(directory)
        flip(path, bit)
        assert len(found) == 1, (path, bit)
        check_naming(found[0], path, bit // 8, by_name.get(path.name))
    assert verify_dir(directory) == []


def check_naming(found: Mismatch, path: Path, offset: int, file: SliceFile | None) -> None:
    assert found.expected != found.actual
    if file is None:
        assert found.file in (MANIFEST_NAME, DIGEST_NAME)
        return
    assert found.file == path.name
    hit = [p.name for p in file.pieces if p.offset_bytes <= offset < p.offset_bytes + p.num_bytes]
    assert found.tensor == hit[0] if hit else found.tensor.startswith("padding after ")


def test_random_bit_flips_are_found_and_named(packed: Path) -> None:
    flip_and_find(packed, 250)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_bit_flips(packed: Path) -> None:
    flip_and_find(packed, 10_000)


def test_padding_between_tensors_counts(packed: Path) -> None:
    manifest = load_manifest(packed)
    file = next(f for s in manifest.stages for f in s.files if gaps(f))
    offset, before = gaps(file)[0]
    flip(packed / file.name, offset * 8)
    (found,) = verify_dir(packed)
    assert found.tensor == f"padding after {before}"


def gaps(file: SliceFile) -> list[tuple[int, str]]:
    ends = [(p.offset_bytes + p.num_bytes, p.name) for p in file.pieces]
    starts = [p.offset_bytes for p in file.pieces[1:]] + [file.num_bytes]
    return [(end, name) for (end, name), start in zip(ends, starts, strict=True) if end < start]


def test_missing_short_and_long_files(packed: Path) -> None:
    manifest = load_manifest(packed)
    one, two, three = (stage.weights for stage in manifest.stages)
    (packed / one).unlink()
    os.truncate(packed / two, (packed / two).stat().st_size - 1)
    with (packed / three).open("ab") as file:
        file.write(b"x")
    found = verify_dir(packed)
    assert (one, "the file is missing") in [(m.file, m.reason) for m in found]
    assert (two, "the size is wrong") in [(m.file, m.reason) for m in found]
    assert (three, "the size is wrong") in [(m.file, m.reason) for m in found]
    with pytest.raises(CorruptWeightsError) as caught:
        require_whole(found, packed)
    assert caught.value.exit_code == 4
    assert caught.value.details["num_mismatches"] == len(found)


def test_a_directory_without_a_manifest(tmp_path: Path) -> None:
    (found,) = verify_dir(tmp_path)
    assert (found.file, found.actual) == (MANIFEST_NAME, "none")


def test_the_manifest_of_another_deployment(packed: Path, untied: Path) -> None:
    other = make_manifest(untied, [10, 20], SETTINGS).manifest
    (found,) = verify_dir(packed, expected=other.digest)
    assert (found.file, found.expected) == (MANIFEST_NAME, other.digest)


def test_consistently_altered_manifest_and_checksum_do_not_pass_a_known_digest(packed: Path) -> None:
    known = load_manifest(packed).digest
    altered = replace(load_manifest(packed), model="evil")
    (packed / MANIFEST_NAME).write_bytes(to_json(altered))
    (packed / DIGEST_NAME).write_text(f"{altered.digest}  {MANIFEST_NAME}\n")
    assert verify_dir(packed) == []
    assert len(verify_dir(packed, expected=known)) == 1


def with_file(manifest: Manifest, change: Callable[[SliceFile], SliceFile]) -> Manifest:
    stage = manifest.stages[0]
    files = (change(stage.files[0]), *stage.files[1:])
    return replace(manifest, stages=(replace(stage, files=files, weights=files[0].name), *manifest.stages[1:]))


BAD_NAMES = ["../evil.gguf", "/etc/passwd", "a/b", "..", "c:evil", "a\\b", "", "NUL.gguf", "x" * 300, MANIFEST_NAME]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_leave_the_folder_are_refused(tiny: Path, name: str) -> None:
    manifest = with_file(make_manifest(tiny, [30], SETTINGS).manifest, lambda f: replace(f, name=name))
    with pytest.raises(CorruptWeightsError):
        parse_manifest(to_json(manifest))


def test_overlapping_pieces_and_wrong_ranges_are_refused(tiny: Path) -> None:
    manifest = make_manifest(tiny, [10, 20], SETTINGS).manifest
    overlapping = with_file(manifest, lambda f: replace(f, pieces=(f.pieces[0], *f.pieces)))
    beyond = with_file(manifest, lambda f: replace(f, num_bytes=10))
    gap = replace(manifest, stages=(manifest.stages[0], replace(manifest.stages[1], start=11)))
    for wrong in (overlapping, beyond, gap, replace(manifest, stages=()), replace(manifest, num_layers=31)):
        with pytest.raises(CorruptWeightsError):
            check_manifest(wrong)


def test_not_canonical_is_refused(tiny: Path) -> None:
    manifest = make_manifest(tiny, [30], SETTINGS).manifest
    with pytest.raises(CorruptWeightsError, match="canonical"):
        parse_manifest(to_json(manifest, indent=1))


def check(directory: Path, stage: StageSlice, key: bytes, *, paranoid: bool = False) -> bool:
    return ensure_verified(paths_in(directory, stage.files), stage, key, record_dir=directory, paranoid=paranoid)


# -- verify once ------------------------------------------------------------------------------------------------


def test_the_second_start_reads_nothing_and_paranoid_reads_always(packed: Path) -> None:
    stage = load_manifest(packed).stages[0]
    assert check(packed, stage, KEY)
    assert not check(packed, stage, KEY)
    assert check(packed, stage, KEY, paranoid=True)


def test_a_changed_file_is_read_again_and_named(packed: Path) -> None:
    stage = load_manifest(packed).stages[0]
    check(packed, stage, KEY)
    flip(packed / stage.weights, 8 * ((packed / stage.weights).stat().st_size - 100))
    os.utime(packed / stage.weights, ns=(1, 1))
    with pytest.raises(CorruptWeightsError) as caught:
        check(packed, stage, KEY)
    details = caught.value.details
    assert stage.weights in details["file"]
    assert details["tensor"]
    assert details["expected"] != details["actual"]


def test_paranoid_finds_what_time_and_size_hide(packed: Path) -> None:
    stage = load_manifest(packed).stages[0]
    check(packed, stage, KEY)
    path = packed / stage.weights
    before = path.stat()
    flip(path, 8 * (before.st_size - 100))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not check(packed, stage, KEY)  # the documented limit of the record
    with pytest.raises(CorruptWeightsError):
        check(packed, stage, KEY, paranoid=True)


def test_records_of_other_nodes_and_forged_ones_count_for_nothing(packed: Path) -> None:
    stage = load_manifest(packed).stages[0]
    check(packed, stage, KEY)
    assert check(packed, stage, b"o" * 32)
    (record_path,) = packed.glob("0-10.verified.json")
    record = from_json(record_path.read_bytes(), VerificationRecord)
    for forged in (replace(record, signature="0" * 64), replace(record, content="0" * 64), replace(record, signature="")):
        record_path.write_bytes(to_json(forged))
        assert check(packed, stage, b"o" * 32)
    record_path.write_bytes(b"garbage")
    assert check(packed, stage, b"o" * 32)


def test_a_folder_that_cannot_be_written_is_verified_every_time(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = load_manifest(packed).stages[0]

    def refuse(self: Path, data: bytes) -> int:
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert check(packed, stage, KEY)
    assert check(packed, stage, KEY)
