"""Whole deployments: a flipped bit ends a launch with everything named; nodes fetch what they lack; nothing secret is written."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import pytest

from shardwise.cli.main import run
from shardwise.deploy import launch_local
from shardwise.deploy.options import Placement, RunOptions
from shardwise.errors import CorruptWeightsError
from shardwise.records import replace

launching = importlib.import_module("shardwise.deploy.launcher")  # the package has a function of that name
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
        launching.launch(sample_gguf, options)
    details = caught.value.details
    assert (details["file"], caught.value.exit_code) == (str(victim), 4)
    assert str(details["tensor"]).startswith("blk.")
    assert details["expected"] != details["actual"]
    victim.unlink()
    with launching.launch(sample_gguf, options) as deployment:
        assert [token.id for token in deployment.generate(PROMPT, max_tokens=4)] == first


def test_nodes_that_have_nothing_fetch_their_slices_from_the_driver(
    sample_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launch_local(sample_gguf, num_stages=3, context_tokens=128, max_sessions=1) as deployment:
        expected = [token.id for token in deployment.generate(PROMPT, max_tokens=8)]
    known = launching.slice_orders

    def elsewhere(*args, **kwargs):  # type: ignore[no-untyped-def]
        return [replace(order, paths=(), model_files=(), store=str(tmp_path / "store")) for order in known(*args, **kwargs)]

    monkeypatch.setattr(launching, "slice_orders", elsewhere)
    options = RunOptions(num_stages=3, context_tokens=128, max_sessions=1)
    places = [Placement(host="127.0.0.2"), Placement(host="127.0.0.3"), Placement()]
    sent = []
    for _ in range(2):
        with launching.launch(sample_gguf, options, placements=places) as deployment:
            assert [token.id for token in deployment.generate(PROMPT, max_tokens=8)] == expected
            assert deployment._pieces is not None
            sent.append(deployment._pieces.sent_bytes)
    total = sum(f.num_bytes for stage in deployment.manifest.stages for f in stage.files)
    # Once everything (what one worker had fetched another on this machine may copy), the second time nothing.
    assert 0.7 * total < sent[0] <= total
    assert sent[1] == 0


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
