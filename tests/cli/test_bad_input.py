"""Bad input at the command line: one clear line on stderr, the right exit status, nothing half-written."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli.main import run
from tests.tiny_models import make_tiny


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, sample_gguf: Path) -> Path:
    """A folder with models of every broken kind; nobody may write there."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "text.gguf").write_text("this is not a model")
    (folder / "empty.gguf").write_bytes(b"")
    whole = sample_gguf.read_bytes()
    (folder / "truncated.gguf").write_bytes(whole[:1_000_000])
    (folder / "cut-weights.gguf").write_bytes(whole[:-1000])
    (folder / "part-00001-of-00002.gguf").write_bytes(whole)
    return folder


CASES = {
    "not a GGUF": (["run", "{dir}/text.gguf", "-p", "hi"], 2, "text.gguf"),
    "empty file": (["describe", "{dir}/empty.gguf"], 2, "empty.gguf"),
    "truncated header": (["describe", "{dir}/truncated.gguf"], 2, "truncated.gguf"),
    "truncated weights": (["run", "{dir}/cut-weights.gguf", "-p", "hi"], 2, "cut-weights.gguf"),
    "part missing": (["describe", "{dir}/part-00001-of-00002.gguf"], 2, "00002-of-00002"),
    "no such file": (["run", "{dir}/nothing.gguf", "-p", "hi"], 2, "nothing.gguf"),
    "misspelt preset": (["describe", "llama-3-70bb:q4_k_m"], 2, "llama-3-70b"),
    "preset has no weights": (["run", "llama-3-8b:q4_k_m", "-p", "hi"], 2, "weights"),
    "too many stages": (["run", "sample", "--stages", "31", "-p", "hi"], 2, "1 to 30"),
    "no stages": (["run", "sample", "--stages", "0", "-p", "hi"], 2, "1 to 30"),
    "layers do not add up": (["run", "sample", "--layers", "10,12", "-p", "hi"], 2, "15,15"),
    "layers are no numbers": (["run", "sample", "--layers", "a,b", "-p", "hi"], 2, "10,12,8"),
    "prompt longer than the context": (
        ["run", "sample", "--ctx", "16", "-p", "word " * 40, "--raw", "--no-predict"],
        2,
        "context holds 16",
    ),
    "empty prompt": (["run", "sample"], 2, "empty"),
    "context beyond the model": (["run", "sample", "--ctx", "999999", "-p", "hi"], 2, "at most 8192"),
    "unknown KV type": (["run", "sample", "--kv-type", "q3", "-p", "hi"], 2, "f16, q8_0"),
    "unknown wire dtype": (["run", "sample", "--wire-dtype", "int4", "-p", "hi"], 2, "f32, f16"),
    "unknown recovery": (["run", "sample", "--recovery", "maybe", "-p", "hi"], 2, "exact, fast, auto, off"),
    "unknown replica": (["run", "sample", "--replicate", "cold", "-p", "hi"], 2, "none, standby, hot"),
    "temperature below zero": (["run", "sample", "--temp", "-1", "-p", "hi"], 2, "temperature"),
    "broken grammar": (["run", "sample", "--grammar", "root ::= (", "-p", "hi"], 2, "GBNF"),
    "broken schema": (["run", "sample", "--json-schema", "{", "-p", "hi"], 2, "JSON"),
    "two grammars": (["run", "sample", "--grammar", "a", "--json-schema", "{}", "-p", "hi"], 2, "only one"),
    "memory too small": (["run", "sample", "--ctx", "2048", "--sessions", "100000", "-p", "hi"], 3, "bytes"),
    "unknown option": (["run", "sample", "--nonsense"], 2, "--nonsense"),
    "unknown command": (["frobnicate"], 2, "frobnicate"),
    "plan file missing": (["run", "sample", "--plan", "{dir}/none.json", "-p", "hi"], 2, "none.json"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line_and_the_right_status(name: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, status, mentions = CASES[name]
    before = sorted(files.rglob("*"))
    assert run([a.replace("{dir}", str(files)) for a in arguments]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) == 1
    assert mentions in err
    assert "Traceback" not in err
    assert sorted(files.rglob("*")) == before


def test_an_error_as_json(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", str(files / "text.gguf"), "--prompt", "hi", "--json"]) == 2
    out, _ = capsys.readouterr()
    error = json.loads(out)["error"]
    assert set(error) >= {"type", "message", "hint"}


def test_an_unproved_architecture_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_tiny("llama", "F16", path=tmp_path / "odd.gguf")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"llama", b"lmmma"))
    assert run(["run", str(path), "-p", "hi", "--stages", "2"]) == 2
    _, err = capsys.readouterr()
    assert "lmmma" in err
    assert "qwen3" in err


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run(["serve", "sample", "--port", str(taken.getsockname()[1])]) == 2
    _, err = capsys.readouterr()
    assert "in use" in err


def test_a_read_only_cache(tmp_path: Path) -> None:
    """As a file where the cache should be: root may write into read-only folders."""
    (tmp_path / "cache").write_text("")
    environment = dict(os.environ, SHARDWISE_CACHE=str(tmp_path / "cache"))
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "run", "sample", "--stages", "2", "-p", "hi"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().splitlines()) == 1


def test_json_output_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "sample", "--stages", "2", "-p", "Say hi", "-n", "8", "--json", "--ignore-eos"]) == 0
    out, _ = capsys.readouterr()
    document = json.loads(out)
    assert len(document["token_ids"]) == 8
    assert document["strategy"] == "layer_wise"
    assert [s["layers"] for s in document["stages"]] == [[0, 15], [15, 30]]
    assert {"from", "to", "tensor", "bytes_per_token", "transfer_s", "copy_s", "sync_wait_s"} <= set(document["boundaries"][0])
    assert document["model"]["revision_digest"]
    assert document["inter_token_s"]["p50"] <= document["inter_token_s"]["p99"]


def test_a_fixed_seed_repeats(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for _ in range(2):
        assert run(["run", "sample", "-p", "Once", "-n", "12", "--temp", "0.9", "--seed", "4", "--quiet", "--raw"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
