"""`describe FOLDER --tp`: a dry run of tensor parallelism."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from shardwise.cli.main import run


def test_a_dry_run_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=256
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    assert run(["describe", str(tmp_path), "--tp", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document
    assert run(["describe", str(tmp_path), "--tp", "1,1"]) == 0
    assert capsys.readouterr().out
    assert run(["describe", str(tmp_path), "--tp", "many"]) == 2
    assert "degree" in capsys.readouterr().err
