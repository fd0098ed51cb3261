"""`shardwise describe`, as a person and as a script see it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.common import Output, set_output
from shardwise.cli.describe import describe
from shardwise.errors import ModelError, UsageError


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("COLUMNS", "160")

    def run(model: str = "", *, as_json: bool = False, **options: object) -> str:
        set_output(Output(json=as_json))
        describe(model, **options)  # type: ignore[arg-type]
        return capsys.readouterr().out

    return run


def test_for_people(show) -> None:  # type: ignore[no-untyped-def]
    text = show("sample")
    for part in (
        "134.5 M",
        "92.1 MiB",
        "30 of width 576",
        "0-29 (30)",
        "22.5 KiB (f16)",
        "12.0 KiB (q8_0)",
        "8192 tokens",
        "gpt2",
    ):
        assert part in text
    assert "by layers" in text
    assert "up to 30" in text


def test_for_people_with_experts_and_tensors(show) -> None:  # type: ignore[no-untyped-def]
    text = show("qwen3-30b-a3b:q4_k_m", tensors=True)
    assert "8 of 128" in text
    assert "of which a token meets 3.0" in text
    assert "blk.47.ffn_down_exps.weight" in text


def test_as_json(show) -> None:  # type: ignore[no-untyped-def]
    data = json.loads(show("sample", as_json=True))
    assert data["num_layers"] == len(data["layers"]) == 30
    assert data["kv_bytes_per_token"]["q8_0"] == 30 * 2 * 3 * 64 * 34 / 32
    layer = data["layers"][4]
    assert layer["bytes_by_quantization"] == {"F32": 4608, "Q4_1": 2211840}
    assert layer["flops_per_token"] == 7077888.0
    assert {t["name"] for t in layer["tensors"]} >= {"blk.4.attn_q.weight", "blk.4.ffn_down.weight"}
    assert [s["strategy"] for s in data["splits"]] == ["layer_wise", "tensor_parallel", "expert_parallel", "data_parallel"]
    assert (len(data["tokenizer"]["digest"]), len(data["revision_digest"])) == (64, 64)


def test_presets_are_listed(show) -> None:  # type: ignore[no-untyped-def]
    assert "llama-3.1-405b" in show(list_presets=True)
    names = {preset["name"] for preset in json.loads(show(list_presets=True, as_json=True))["presets"]}
    assert {"llama-2-70b", "deepseek-v3", "bloom-176b"} <= names


def test_wrong_usage(show, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match="no MODEL"):
        show()
    with pytest.raises(UsageError, match="'f8' is unknown"):
        show("sample", kv_type="f8")
    with pytest.raises(ModelError, match="no such model file"):
        show(str(tmp_path / "no.gguf"))
