"""Keys, limits, hosts, origins, body limits, logs without prompts."""

from __future__ import annotations

import logging
import os
import socket
import stat
from pathlib import Path

import openai
import pytest

from shardwise.deploy.deployment import Deployment
from shardwise.errors import UsageError
from shardwise.server.access import new_key, read_keys
from shardwise.server.engine import EngineSlot
from shardwise.server.settings import ServerSettings, check_exposure

from .running import Running, running_server


def test_keys_are_named_hashed_and_private(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    first, second = new_key(file, "anna"), new_key(file, "bert", requests_per_minute=2)
    assert first != second
    text = file.read_text()
    assert first not in text
    assert second not in text
    assert [key.name for key in read_keys(file)] == ["anna", "bert"]
    if os.name == "posix":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(UsageError, match="already a key named 'anna'"):
        new_key(file, "anna")
    with pytest.raises(UsageError, match="cannot read"):
        read_keys(tmp_path / "none.json")


def test_a_key_is_needed_where_there_are_keys(deployment: Deployment, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = new_key(file, "anna")
    with running_server(deployment, keys=read_keys(file)) as server:
        for path in ("/v1/models", "/metrics", "/api/status", "/api/events"):
            assert server.http.get(path).status_code == 401, path
            assert server.http.get(path, headers={"Authorization": "Bearer sw-wrong"}).status_code == 401
        assert server.http.post("/tokenize", json={"content": "x"}).status_code == 401
        for path in ("/health/live", "/health/ready", "/", "/static/app.js"):
            assert server.http.get(path).status_code == 200, path
        stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="sw-wrong", max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError, match="not known"):
            stranger.models.list()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as known:
            assert known.models.list().data[0].id == "sample"


def test_rate_limits_tell_when_to_come_back(deployment: Deployment, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    few = new_key(file, "few", requests_per_minute=2)
    small = new_key(file, "small", tokens_per_minute=20)
    with running_server(deployment, keys=read_keys(file)) as server:
        headers = {"Authorization": f"Bearer {few}"}
        body = {"content": "x"}
        answers = [server.http.post("/tokenize", json=body, headers=headers) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[0].headers["x-ratelimit-remaining-requests"] == "1"
        assert 1 <= int(answers[2].headers["retry-after"]) <= 30
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=small, max_retries=0) as client:
            ask = [{"role": "user", "content": "Say hi"}]
            client.chat.completions.create(model="sample", messages=ask, max_tokens=4)  # type: ignore[call-overload]
            with pytest.raises(openai.RateLimitError, match="20 tokens per minute"):
                client.chat.completions.create(model="sample", messages=ask, max_tokens=4)  # type: ignore[call-overload]


def test_a_public_bind_needs_a_key() -> None:
    with pytest.raises(UsageError, match="can be reached by other machines"):
        check_exposure(ServerSettings(host="0.0.0.0"), has_keys=False)
    check_exposure(ServerSettings(host="0.0.0.0"), has_keys=True)
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        check_exposure(ServerSettings(host=host), has_keys=False)


def test_foreign_pages_and_names_are_refused(server: Running) -> None:
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example"):
        assert server.http.get("/health/live", headers={"Host": host}).status_code == 403, host
    for origin in ("https://evil.example", "http://localhost:1", "null"):
        answer = server.http.post("/tokenize", json={"content": "x"}, headers={"Origin": origin})
        assert answer.status_code == 403, origin
        assert "access-control-allow-origin" not in answer.headers
    own = server.http.post("/tokenize", json={"content": "x"}, headers={"Origin": server.url})
    assert own.status_code == 200
    preflight = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert server.http.options("/v1/chat/completions", headers=preflight).status_code == 403


def test_a_named_origin_may_ask(deployment: Deployment) -> None:
    origin = "https://page.example"
    with running_server(deployment, cors_origins=(origin,)) as server:
        preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        answer = server.http.options("/v1/chat/completions", headers=preflight)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == origin
        asked = server.http.post("/tokenize", json={"content": "x"}, headers={"Origin": origin})
        assert asked.headers["access-control-allow-origin"] == origin


def test_a_body_that_never_comes_is_not_waited_for() -> None:
    with running_server(slot=EngineSlot(), body_timeout_s=0.5) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            raw.sendall(b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 50\r\n\r\n{")
            assert raw.recv(200).startswith(b"HTTP/1.1 408")
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            raw.sendall(b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n")
            assert raw.recv(200).startswith(b"HTTP/1.1 413")


def test_logs_have_the_request_id_and_never_the_prompt(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    secret = "xyzzy-very-private"
    with caplog.at_level(logging.DEBUG):
        answer = server.http.post(
            "/v1/chat/completions",
            json={"model": "sample", "messages": [{"role": "user", "content": secret}], "max_tokens": 2},
            headers={"X-Request-Id": "mine-1"},
        )
        server.http.post("/v1/chat/completions", json={"model": "sample", "messages": secret})
        server.http.get(f"/v1/models/{'x' * 10}?q={secret}")
    assert answer.headers["x-request-id"] == "mine-1"
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("shardwise")]
    assert any("mine-1" in line and "status=200" in line for line in ours)
    assert not any(secret in line for line in ours)
    assert secret not in server.http.get("/api/status").text
    forged = server.http.get("/health/live", headers={"X-Request-Id": "a b"})
    assert forged.headers["x-request-id"].startswith("req_")
