"""The requests of `docs/serve.md` are answered as they stand there, and its defaults are the server's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shardwise.server.sampling import sampling_settings
from shardwise.server.schemas.chat import ChatRequest
from shardwise.server.schemas.completions import CompletionRequest

from .running import Running

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
REQUESTS = re.findall(r"^\$ curl http://127\.0\.0\.1:8000(\S+) [^\n]*?-d '(.*?)'$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_documented_request_is_answered(server: Running, path: str, body: str) -> None:
    answer = server.http.post(path, json=json.loads(body))
    assert answer.status_code == 200, answer.text
    if path.endswith("/completions"):
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
        assert {"temperature", "max_tokens"} <= set(json.loads(body))


def test_every_endpoint_with_a_body_of_its_own_is_shown() -> None:
    assert [path for path, _ in REQUESTS] == ["/v1/chat/completions", "/tokenize", "/tokenize", "/detokenize"]


def test_the_documented_defaults_are_the_servers() -> None:
    rows = dict(re.findall(r"^\| (`.*?) \| (.*?) \|", TEXT.split("not as in `shardwise run`")[1], re.MULTILINE))
    request = ChatRequest(model="sample", messages=[{"role": "user", "content": "Hi"}])
    found = sampling_settings(request, vocab_size=100)
    assert rows["`temperature`"] == f"{found.temperature:g}"
    assert rows["`top_p`, `typical_p`"] == f"{found.top_p:g} (off)" == f"{found.typical_p:g} (off)"
    assert rows["`top_k`, `min_p`"] == f"{found.top_k:g} (off)" == f"{found.min_p:g} (off)"
    penalties = rows["`frequency_penalty`, `presence_penalty`"]
    assert penalties == f"{found.frequency_penalty:g}" == f"{found.presence_penalty:g}"
    assert found.repetition_penalty == 1
    assert found.seed != sampling_settings(request, vocab_size=100).seed
    assert request.max_tokens is None
    assert CompletionRequest(model="sample", prompt="Hi").max_tokens == 16
