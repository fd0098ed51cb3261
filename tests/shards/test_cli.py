"""`shardwise pack` and `shardwise verify` as people and scripts call them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.main import run


def packed(tiny: Path, tmp_path: Path) -> Path:
    assert run(["--quiet", "pack", str(tiny), "--layers", "10,12,8", "--ctx", "128", "--out", str(tmp_path / "out")]) == 0
    return tmp_path / "out"


def test_pack_and_verify_as_json(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pack", str(tiny), "--stages", "3", "--ctx", "128", "--out", str(tmp_path), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [stage["layers"] for stage in made["stages"]] == [[0, 10], [10, 20], [20, 30]]
    assert all((tmp_path / file["name"]).stat().st_size == file["bytes"] for stage in made["stages"] for file in stage["files"])
    assert run(["verify", str(tmp_path), "--json", "--digest", made["manifest_digest"]]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert checked["whole"] is True
    assert (checked["manifest_digest"], checked["bytes"]) == (made["manifest_digest"], made["bytes"])


def test_a_flipped_bit_ends_with_status_4_and_names_everything(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = packed(tiny, tmp_path)
    victim = directory / "tiny.layers-10-22.gguf"
    data = bytearray(victim.read_bytes())
    data[-500] ^= 1
    victim.write_bytes(data)
    capsys.readouterr()
    assert run(["verify", str(directory), "--json"]) == 4
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "CorruptWeightsError"
    assert error["tensor"].startswith(("blk.", "output_norm", "rope_freqs", "token_embd"))
    assert error["file"] == str(victim)
    assert error["expected"] != error["actual"]
    assert run(["verify", str(directory)]) == 4
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert error["expected"] in shown.err
    assert error["actual"] in shown.err


def test_another_digest_is_refused(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(packed(tiny, tmp_path)), "--digest", "0" * 64]) == 4
    assert "0" * 64 in capsys.readouterr().err


def test_wrong_usage(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(tmp_path / "missing")]) == 2
    assert run(["pack", str(tiny), "--layers", "1,2", "--ctx", "128", "--out", str(tmp_path / "o")]) == 2
    assert run(["pack", str(tiny), "--stages", "2", "--ctx", "128"]) == 2
    assert capsys.readouterr().err.count("error: ") == 3
    assert not (tmp_path / "o").exists()
