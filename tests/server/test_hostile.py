"""Clients that mean no good, or no longer listen: the server stays there for the others, and nothing of theirs is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from shardwise.deploy.deployment import Deployment
from shardwise.server import protocol
from shardwise.server.access import new_key, read_keys
from shardwise.server.protocol import GuardedProtocol
from shardwise.server.run import listen
from shardwise.server.settings import ServerSettings

from .running import CLOCK, Running, running_server, wait_until
from .scripted import ScriptedGeneration, Words

resource = pytest.importorskip("resource", reason="counts of open files are a thing of Unix")


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def chat_bytes(**fields: object) -> bytes:
    """A request whose answer does not end before `max_tokens`: both tokens that could end it are out of reach."""
    body = {"model": "sample", "messages": [{"role": "user", "content": "Tell a long story."}], "max_tokens": 200}
    body = body | {"logit_bias": {"0": -100, "2": -100}} | fields
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    )
    return head.encode() + b"\r\n\r\n" + data


def ends(connection: socket.socket) -> bytes:
    """Whatever comes until the other side ends the connection, in whichever way."""
    out = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(65536):
            out += data
    return out


def check_unharmed(server: Running, deployment: Deployment) -> None:
    wait_until(lambda: not any(stage.sessions for stage in deployment.stats()), 20, "all KV to be freed")
    wait_until(lambda: not server.state.activity.active, 10, "all requests to be forgotten")
    assert server.chat().status_code == 200


def test_a_thousand_silent_connections_disturb_nobody_and_are_closed(
    server: Running, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 3.0)
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    silent = [connect(server) for _ in range(min(1000, (room - 400) // 2))]
    for index, connection in enumerate(silent):
        connection.sendall(b"" if index % 2 else b"GET / HTTP/1.1\r\nX-Slow: a")  # every second one is a slowloris
    started_s = CLOCK.now_s()
    assert server.http.get("/health/live").status_code == 200
    assert CLOCK.now_s() - started_s < 2.0
    assert server.chat().status_code == 200
    for connection in silent:
        assert ends(connection) == b""
        connection.close()
    assert CLOCK.now_s() - started_s < 20.0
    check_unharmed(server, deployment)


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\nX: " + b"a" * 500_000, b"GET /" + b"a" * 500_000, b"a" * 500_000])
def test_heads_without_end_are_refused(server: Running, head: bytes) -> None:
    with connect(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(head)
        answer = ends(connection)
        assert not answer or answer.split()[1] in (b"431", b"400")
    assert server.http.get("/health/live").status_code == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # somebody who tries TLS
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    ],
)
def test_what_is_not_http_is_refused(server: Running, request_bytes: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(request_bytes)
        connection.shutdown(socket.SHUT_WR)
        answer = ends(connection)
        assert not answer or answer.split()[1][:1] == b"4"


M = 4 * 2**20 - 4096
ASK = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x<|im_end|>" * (M // 11)}),
        ("/v1/completions", {"prompt": [1] * (M // 3)}),
        ("/v1/completions", {"prompt": [None] * (M // 6)}),
        ("/v1/completions", {"prompt": [[1]] * (M // 5)}),
        ("/v1/completions", {"prompt": "hi", "stop": [1] * (M // 3)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x<|im_end|>" * (M // 11)}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [0] * (M // 3)}]}),
        ("/v1/chat/completions", {"messages": [{}] * (M // 4)}),
        ("/v1/chat/completions", {"messages": ASK, "tools": [1] * (M // 3)}),
        ("/v1/chat/completions", {"messages": ASK} | {f"f{number}": 1 for number in range(M // 14)}),
        ("/v1/chat/completions", {"messages": ASK, "stream_options": {f"f{number}": 1 for number in range(M // 14)}}),
        ("/v1/responses", {"input": [1] * (M // 3)}),
        ("/v1/embeddings", {"input": [None] * (M // 6)}),
        ("/tokenize", {"content": "x<|im_end|>" * (M // 11)}),
        ("/detokenize", {"tokens": ["x"] * (M // 5)}),
    ],
)
def test_four_megabytes_of_nonsense_are_refused_soon(server: Running, path: str, body: dict[str, object]) -> None:
    """Unbounded, half a megabyte of nulls held the loop for 0.6 s, and 128 KB of control tokens a core for 0.7 s (squared)."""
    model = {} if path.endswith("tokenize") else {"model": "sample"}
    data = json.dumps(model | body, separators=(",", ":")).encode()
    assert M * 0.6 < len(data) <= 4 * 2**20
    started_s = CLOCK.now_s()
    answer = server.http.post(path, content=data, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    assert 10 < len(answer.json()["error"]["message"]) < 1000
    assert CLOCK.now_s() - started_s < (15.0 if path == "/tokenize" else 6.0)


def test_a_storm_of_hang_ups_leaves_nothing(server: Running, deployment: Deployment) -> None:
    """Before the answer, in its middle, after its head; many at once."""

    def storm(number: int) -> None:
        for turn in range(8):
            with connect(server) as connection:
                connection.sendall(chat_bytes(stream=turn % 2 == 0, n=1 + turn % 2, max_tokens=50))
                if (number + turn) % 3:
                    connection.settimeout(0.05 * ((number + turn) % 5))
                    with contextlib.suppress(OSError):
                        connection.recv(200)

    threads = [threading.Thread(target=storm, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    check_unharmed(server, deployment)


def test_a_storm_of_wrong_keys_costs_little(deployment: Deployment, tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys.json", "home")
    with running_server(deployment, keys=read_keys(tmp_path / "keys.json")) as server:
        for number in range(200):
            refused = server.http.get("/v1/models", headers={"Authorization": f"Bearer sk-{number}"})
            assert refused.status_code == 401
        assert server.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


async def endless(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """An application that answers with 64 MiB."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1024):
            await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})


@pytest.fixture
def endless_port() -> Iterator[int]:
    bound = listen(ServerSettings(port=0))
    server = uvicorn.Server(uvicorn.Config(endless, http=GuardedProtocol, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started, 10, "the server to start")
    yield bound.getsockname()[1]
    server.should_exit = True
    thread.join(20)
    bound.close()
    assert not thread.is_alive()


def test_who_does_not_read_is_cut_off(endless_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "STALL_TIMEOUT_S", 0.5)
    with socket.create_connection(("127.0.0.1", endless_port), timeout=20) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        CLOCK.sleep(1.5)  # the client's own laziness: nothing can be waited for
        received = ends(connection)
        assert 0 < len(received) < 64 * 2**20


def test_what_comes_while_a_client_is_slow_follows_in_order() -> None:
    """A stream whose connection takes nothing for a while: nothing is lost, and it is sent together afterwards."""
    asyncio.run(_slow_client())


async def _slow_client() -> None:
    writable, sent = asyncio.Event(), []

    async def send(message: dict[str, Any]) -> None:
        if sent:  # the head passes
            await writable.wait()
        sent.append(message)

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    generation = ScriptedGeneration()
    stream = generation.stream(Words())
    answering = asyncio.ensure_future(stream({"type": "http"}, receive, send))
    await asyncio.sleep(0)
    for number in range(5):
        generation.say(f"{number} ", last=number == 4)
        await asyncio.sleep(0)
    assert len(sent) == 1
    writable.set()
    await asyncio.wait_for(answering, 5)
    assert b"".join(message.get("body", b"") for message in sent) == b"<0 1 2 3 4 >"
    assert len(sent) <= 4
    assert sent[-1]["more_body"] is False
    assert generation.closed
