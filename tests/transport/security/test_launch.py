"""Whole deployments: a flipped bit ends a launch with everything named; nodes fetch what they lack; nothing secret is written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shardwise.cli.main import run
from shardwise.deploy import launch, launch_local
from shardwise.deploy.options import Placement, RunOptions
from shardwise.errors import CorruptWeightsError
from tests.needs import needs_lab

PROMPT = "The quick brown fox jumps over the lazy dog."


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))


def flip_a_bit(tmp_path: Path, *, keep_time: bool) -> Path:
    """In the middle of the second stage's slice, in the cache."""
    (path,) = (tmp_path / "cache" / "slices").rglob("*.layers-15-30.gguf")
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        byte = file.read(1)[0]
        file.seek(before.st_size // 2)
        file.write(bytes([byte ^ 8]))
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return path


def test_a_flipped_bit_ends_the_launch(sample_gguf: Path, tmp_path: Path) -> None:
    with launch_local(sample_gguf, num_stages=2, context_tokens=128, max_sessions=1) as deployment:
        first = [token.id for token in deployment.generate(PROMPT, max_tokens=4)]
    victim = flip_a_bit(tmp_path, keep_time=True)
    options = RunOptions(num_stages=2, context_tokens=128, max_sessions=1, paranoid=True)
    with pytest.raises(CorruptWeightsError) as caught:
        launch(sample_gguf, options)
    details = caught.value.details
    assert (details["file"], caught.value.exit_code) == (str(victim), 4)
    assert str(details["tensor"]).startswith("blk.")
    assert details["expected"] != details["actual"]
    victim.unlink()
    with launch(sample_gguf, options) as deployment:
        assert [token.id for token in deployment.generate(PROMPT, max_tokens=4)] == first


def hidden_from(folders: list[Path]) -> tuple[str, ...]:
    """What to put before a command so that these folders are empty for it, as on another machine."""
    mounts = " && ".join(f"mount -t tmpfs none '{folder}'" for folder in folders)
    return ("unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "worker")


@pytest.mark.netns
@needs_lab
def test_nodes_that_have_nothing_fetch_their_slices_from_the_driver(sample_gguf: Path, tmp_path: Path) -> None:
    options = RunOptions(num_stages=2, context_tokens=128, max_sessions=1, cache_dir=str(tmp_path / "driver"))
    with launch(sample_gguf, options) as deployment:
        expected = [token.id for token in deployment.generate(PROMPT, max_tokens=8)]
    elsewhere = hidden_from([tmp_path / "driver", sample_gguf.parent])
    places = [Placement(host=host, prefix=elsewhere) for host in ("127.0.0.2", "127.0.0.3")]
    stored = []
    for _ in range(2):
        with launch(sample_gguf, options, placements=places) as deployment:
            assert [token.id for token in deployment.generate(PROMPT, max_tokens=8)] == expected
        stored.append({path: path.stat().st_ino for path in (tmp_path / "cache" / "store" / "slices").rglob("*.gguf")})
    assert len(stored[0]) == 3
    assert stored[0] == stored[1]  # the second launch fetched nothing
    total = sum(file.num_bytes for stage in deployment.manifest.stages for file in stage.files)
    assert sum(path.stat().st_size for path in stored[0]) == total


@pytest.mark.netns
@needs_lab
def test_a_folder_that_the_nodes_see_is_used_before_the_driver(sample_gguf: Path, tmp_path: Path) -> None:
    flags = ["--layers", "15,15", "--ctx", "128", "--quiet"]
    assert run(["pack", str(sample_gguf), *flags, "--out", str(tmp_path / "nas")]) == 0
    nas = (str(tmp_path / "nas"),)
    common = {"num_stages": 2, "context_tokens": 128, "max_sessions": 1, "cache_dir": str(tmp_path / "driver")}
    slow = RunOptions(**common, weights_from=nas, fetch_bytes_per_s=1000.0)  # from the driver it would take a day
    (tmp_path / "driver").mkdir()
    elsewhere = hidden_from([tmp_path / "driver", sample_gguf.parent])
    places = [Placement(host=host, prefix=elsewhere) for host in ("127.0.0.2", "127.0.0.3")]
    with launch(sample_gguf, slow, placements=places) as deployment:
        assert len([token.id for token in deployment.generate(PROMPT, max_tokens=4)]) == 4


def test_keys_and_prompts_are_in_no_log_error_or_command_line(
    sample_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "run",
        str(sample_gguf),
        "--stages",
        "2",
        "--ctx",
        "128",
        "--prompt",
        PROMPT,
        "--max-tokens",
        "4",
        "-v",
        "--json",
    ]
    assert run(arguments) == 0
    captured = capfd.readouterr()
    assert PROMPT not in captured.err
    secret = json.loads((tmp_path / "state" / "node.key").read_text())["secret"]
    assert secret not in captured.err + captured.out
    flip_a_bit(tmp_path, keep_time=False)
    # The cache notices by itself and cuts the slice anew: corruption between two launches costs time, nothing else.
    assert run(arguments) == 0
    assert PROMPT not in capfd.readouterr().err
