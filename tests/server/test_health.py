"""Health that means it: loading with progress, ready, a killed stage under load, disconnects that free KV, no lie in between."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading

import httpx
import pytest

from shardwise.deploy.deployment import Deployment
from shardwise.errors import StageLoadFailed
from shardwise.server.engine import EngineSlot, LoadingProgress

from .running import CLOCK, Running, running_server, wait_until


def stream_text(url: str, fields: dict[str, object], got: list[str], failures: list[str]) -> None:
    """One streamed answer, collected; anything that is not a clean end is a failure."""
    body = {"model": "sample", "messages": [{"role": "user", "content": "Tell a long story."}], "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body | fields, timeout=90) as response:
        if response.status_code != 200:
            failures.append(f"status {response.status_code}: {response.read()!r}")
            return
        done = False
        for line in response.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    failures.append(json.dumps(chunk))
                    return
                got += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
        if not done:
            failures.append("the stream ended without [DONE]")


def freed_after_s(deployment: Deployment) -> float:
    """Seconds until no stage holds a session, without the time that asking for it took (long on a busy machine)."""
    started_s = CLOCK.now_s()
    while CLOCK.now_s() - started_s < 10:
        asked_s = CLOCK.now_s()
        if not any(stage.sessions for stage in deployment.stats()):
            return asked_s - started_s
    raise AssertionError("the KV was not freed within 10 s")


def test_while_loading_everything_says_so_with_progress_and_time() -> None:
    slot = EngineSlot(loading=lambda: LoadingProgress(0.4, 12.0, "loading the stages"))
    with running_server(slot=slot) as server:
        assert server.http.get("/health/live").status_code == 200
        ready = server.http.get("/health/ready")
        assert ready.status_code == 503
        assert (ready.json()["progress"], ready.json()["expected_s"]) == (0.4, 12.0)
        assert ready.headers["retry-after"] == "12"
        for response in (server.chat(), server.http.get("/v1/models")):
            assert response.status_code == 503
            assert "loading the stages" in response.json()["error"]["message"]
            assert response.json()["error"]["progress"] == 0.4
        slot.fail(StageLoadFailed("the slice is cut off", where="stage 1"))
        assert "cut off" in server.http.get("/health/ready").json()["reason"]
        assert server.http.get("/health/live").status_code == 200


def test_ready_means_a_token_came_through(server: Running) -> None:
    answer = server.http.get("/health/ready")
    assert answer.status_code == 200
    assert answer.json()["last_token_age_s"] < 5


def test_a_disconnected_client_frees_its_kv_within_a_second(server: Running, deployment: Deployment) -> None:
    body = {
        "model": "sample",
        "messages": [{"role": "user", "content": "Count to a thousand."}],
        "max_tokens": 800,
        "stream": True,
    }
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        for _ in range(8):
            next(lines)
        assert any(stage.sessions for stage in deployment.stats())
    assert freed_after_s(deployment) < 1.0
    assert all(stage.kv_tokens == 0 for stage in deployment.stats())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_it_waits_is_forgotten_too(server: Running, deployment: Deployment, stream: bool) -> None:
    """Before the first token, and in an answer that is not streamed."""
    body = json.dumps(
        {
            "model": "sample",
            "messages": [{"role": "user", "content": "story " * 40}],
            "max_tokens": 500,
            "stream": stream,
        }
    ).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        wait_until(lambda: any(stage.sessions for stage in deployment.stats()), 10, "the session to begin")
    assert freed_after_s(deployment) < 1.0
    assert not server.state.activity.active


def test_a_killed_stage_under_load_pauses_streams_and_never_lies(server: Running, deployment: Deployment) -> None:
    """Four streams go on after the kill, equal to an undisturbed run; /health/ready is false in between and true again after."""
    undisturbed: list[str] = []
    failures: list[str] = []
    stream_text(server.url, {"max_tokens": 60, "seed": 1}, undisturbed, failures)
    texts: list[list[str]] = [[] for _ in range(4)]
    threads = [
        threading.Thread(target=stream_text, args=(server.url, {"max_tokens": 60, "seed": 1}, text, failures)) for text in texts
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(len(text) > 6 for text in texts), 60, "all streams to run")
    os.kill(deployment.stages[0].pid, signal.SIGKILL)
    killed_s = CLOCK.now_s()
    unready_s = wait_until(lambda: server.http.get("/health/ready").status_code == 503, 5, "readiness to go")
    assert unready_s < 1.0
    refused = server.chat()
    if refused.status_code != 200:  # a very fast recovery may be over already
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
    wait_until(lambda: server.http.get("/health/ready").status_code == 200, 40, "readiness to come back")
    answered = server.chat()  # what says ready must generate
    assert answered.status_code == 200
    for thread in threads:
        thread.join(timeout=90)
        assert not thread.is_alive()
    assert not failures
    assert ["".join(text) for text in texts] == ["".join(undisturbed)] * 4
    assert deployment.recoveries
    assert CLOCK.now_s() - killed_s < 80
