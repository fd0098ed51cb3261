"""What stands in data, errors and names comes out as it is, and a progress bar tells of one thing at a time."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from shardwise.cli import common, doctor
from shardwise.cli.common import Output, set_output
from shardwise.cli.main import run
from shardwise.probe.doctor import Finding
from tests.tiny_models import make_tiny

ODD = "a[ray] 10:100:5 [/] [[x]]"  # markup, an emoji's code, and a tag that closes nothing


def shardwise(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program, in a terminal too wide to fold anything."""
    return subprocess.run(
        [sys.executable, "-m", "shardwise", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=cwd,
        env=os.environ | {"COLUMNS": "200"} | environment,
    )


def test_the_doctors_cures_can_be_typed_as_they_are_shown() -> None:
    """The same machine as data and as text: not a word is missing."""
    shown = shardwise("doctor")
    findings = json.loads(shardwise("doctor", "--json").stdout)["findings"]
    for text in [f["cure"] for f in findings if f["cure"]]:
        assert text in shown.stdout, text


def test_a_finding_is_shown_to_the_letter(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from shardwise.probe import doctor as rules

    monkeypatch.setattr(rules, "examine", lambda facts: [Finding(level="warning", check="x", message=ODD, cure=ODD)])
    set_output(Output())
    doctor.doctor(every=True)
    assert capsys.readouterr().out.count(ODD) == 2


def test_a_damaged_file_is_named_to_the_letter(tmp_path: Path) -> None:
    folder = tmp_path / "[red]"
    folder.mkdir()
    model = make_tiny("llama", "F16", path=folder / "a[ray]:100:.gguf")
    assert shardwise("describe", str(model), "--tensors").returncode == 0
    packed = shardwise("pack", str(model), "--out", str(folder / "out"), "--ctx", "512")
    assert packed.returncode == 0, packed.stderr
    part = next((folder / "out").rglob("*.gguf"))
    part.write_bytes(part.read_bytes()[:-40] + bytes(40))
    broken = shardwise("verify", str(folder / "out"))
    assert broken.returncode == 4
    assert "[red]" in broken.stderr


def test_notes_and_tables_are_shown_to_the_letter(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.table import Table

    monkeypatch.setenv("COLUMNS", "200")
    out = Output()
    table = Table(ODD)
    table.add_row(ODD)
    out.note(ODD)
    out.note(table)
    out.plain(ODD)
    out.plain(table)
    told = capsys.readouterr()
    assert told.err.count(ODD) == 3
    assert told.out.count(ODD) == 3


def test_a_bar_tells_of_one_step_at_a_time() -> None:
    """The steps of before do not stay at "8 %" below "done 100 %"."""
    out = Output()
    out.stderr = Console(file=io.StringIO(), force_terminal=True, width=80)
    with out.progress() as update:
        update("threads [ray]", 0.08)
        time.sleep(0.25)  # the bar draws ten times a second
        update("done", 0.9)
        time.sleep(0.25)
        update("done", 1.0)
    seen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.stderr.file.getvalue())  # type: ignore[attr-defined]
    assert "threads [ray]" in seen
    assert "threads" not in seen[seen.index("done") :]
    assert "100 %" in seen


def test_an_error_is_shown_to_the_letter(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["describe", "/nothing/a[ray]:100:.gguf"]) == 2
    assert "/nothing/a[ray]:100:.gguf" in capsys.readouterr().err
    assert common.output().json is False
