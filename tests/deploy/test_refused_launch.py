"""A launch that is refused leaves no process, though the workers' interpreters were started before the model was looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from shardwise.deploy import launch_local
from shardwise.errors import MalformedModelError, ModelError, ShardwiseError, StageLoadFailed, StageOutOfMemory, UsageError


def processes() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"num_stages": 0}, UsageError),
        ({"num_stages": -3}, UsageError),
        ({"num_stages": 1000}, UsageError),
        ({"layers": (10, 10)}, UsageError),
        ({"num_stages": 2, "context_tokens": 10**9}, UsageError),
        ({"num_stages": 2, "max_sessions": 10**7}, StageOutOfMemory),
    ],
    ids=["none", "negative", "too many", "do not add up", "context", "memory"],
)
def test_impossible_settings(sample_gguf: Path, settings: dict[str, Any], error: type[ShardwiseError]) -> None:
    before = processes()
    with pytest.raises(error):
        launch_local(sample_gguf, **settings)
    assert processes() == before


def test_a_model_that_is_none(tmp_path: Path) -> None:
    bad, before = tmp_path / "bad.gguf", processes()
    bad.write_bytes(b"no model at all")
    with pytest.raises(MalformedModelError):
        launch_local(bad, num_stages=2)
    with pytest.raises(ModelError, match="no such model file"):
        launch_local(tmp_path / "missing.gguf", num_stages=2)
    assert processes() == before


def test_a_tokenizer_that_llama_cpp_refuses(sample_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found while the workers load: they end."""
    from shardwise.deploy.tokenizer import LlamaTokenizer

    def refuse(self: LlamaTokenizer) -> None:
        raise StageLoadFailed("llama.cpp cannot read the tokenizer", where="a file")

    before = processes()
    monkeypatch.setattr(LlamaTokenizer, "load", refuse)
    with pytest.raises(StageLoadFailed, match="tokenizer"):
        launch_local(sample_gguf, num_stages=2, context_tokens=256)
    assert processes() == before
