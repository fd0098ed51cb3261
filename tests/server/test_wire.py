"""HTTP as it should not be spoken: odd framing, upgrades, paths, methods. Answered or refused; never a 500, never for long."""

from __future__ import annotations

import json
import socket

import pytest

from shardwise.deploy.deployment import Deployment

from .running import CLOCK, Running
from .test_hostile import chat_bytes, check_unharmed, connect, ends

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def answers_of(data: bytes) -> list[int]:
    """The status lines in what came, without interim ones."""
    statuses = [int(part.split()[0]) for part in data.split(b"HTTP/1.1 ")[1:]]
    return [status for status in statuses if status != 100]


def spoken(server: Running, *pieces: bytes) -> bytes:
    """What comes back until the connection ends."""
    with connect(server) as connection:
        for piece in pieces:
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)
        return ends(connection)


def test_requests_in_one_breath_are_answered_one_after_the_other(server: Running, deployment: Deployment) -> None:
    """Pipelined: a stream, an answer, an error; each whole before the next begins."""
    bodies = [chat_bytes(stream=True, max_tokens=5), chat_bytes(max_tokens=5), chat_bytes(max_tokens=-5)]
    last = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(b"".join(bodies) + last)
        data = ends(connection)
    assert answers_of(data) == [200, 200, 400, 200]
    assert data.index(b"data: [DONE]") < data.index(b'"chat.completion"') < data.index(b'"max_tokens"')
    check_unharmed(server, deployment)


@pytest.mark.parametrize("junk", [b"tea\r\n\r\n", b"x" * 100_000, b"\x00" * 1000, b"GET / HTTP/1.1\r\n" * 5000])
def test_junk_behind_a_request_ends_that_connection_only(server: Running, deployment: Deployment, junk: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(chat_bytes(stream=True, max_tokens=100))
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
        try:
            connection.sendall(junk)
            ends(connection)
        except ConnectionError:
            pass
    check_unharmed(server, deployment)


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"Content-Length: 2\r\nContent-Length: 40\r\n\r\n{}",
        b"Content-Length: 2, 2\r\n\r\n{}",
        b"Content-Length: +2\r\n\r\n{}",
        b"Content-Length : 2\r\n\r\n{}",
        b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n{}",
        b"Transfer-Encoding: chunked\r\n\r\n-1\r\n{}",
        b"Content-Length: 2\r\nX: a\r\n b\r\n\r\n{}",
        b"Content-Length: 2\r\n\x00X: a\r\n\r\n{}",
        b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00",
        b"Content-Length: 50\r\n\r\n{}",
    ],
)
def test_no_framing_smuggles_a_second_request(server: Running, head: bytes) -> None:
    started_s = CLOCK.now_s()
    statuses = answers_of(spoken(server, POST + head))
    assert len(statuses) <= 1
    assert all(400 <= status < 500 for status in statuses)
    assert CLOCK.now_s() - started_s < 10.0


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c", b"tea"])
def test_an_upgrade_is_not_taken(server: Running, protocol: bytes) -> None:
    head = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: " + protocol
    head += b"\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    assert answers_of(spoken(server, head)) in ([200], [400], [])


@pytest.mark.parametrize(
    "path",
    [
        "/static/../run.py",
        "/static/%2e%2e/run.py",
        "/static/..%2frun.py",
        "/static//etc/passwd",
        "/static/%00",
        "/static/" + "a/" * 2000,
        "/%00",
        "//v1/models",
        "/v1//models",
        "/v1/models/..%2f..%2fetc%2fpasswd",
        "/v1/models/%ff%fe",
        "/" + "%" * 100,
        "http://example.org/v1/models",
        "*",
    ],
)
def test_paths_lead_nowhere_else(server: Running, path: str) -> None:
    data = spoken(server, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    statuses = answers_of(data)
    assert len(statuses) <= 1
    assert all(status == 200 or 300 <= status < 500 for status in statuses)
    assert b"root:" not in data
    assert b"def serve_forever" not in data


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "TRACE", "HEAD", "CONNECT", "PROPFIND", "get"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/metrics", "/", "/api/events", "/tokenize"])
def test_methods_that_nobody_offers(server: Running, method: str, path: str) -> None:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    statuses = answers_of(spoken(server, head.encode()))
    assert all(status == 200 or 400 <= status < 500 for status in statuses)


def test_expecting_a_go_ahead_gets_one_or_the_refusal(server: Running) -> None:
    """The body is not waited for where the head is refused already."""
    huge = POST + b"Expect: 100-continue\r\nContent-Length: 99999999\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(huge)
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")
    body = json.dumps({"model": "sample", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
    with connect(server) as connection:
        connection.sendall(POST + b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
        assert connection.recv(4096).startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        assert answers_of(ends(connection)) == [200]


def test_many_who_look_and_do_not_read(server: Running, deployment: Deployment) -> None:
    """Two hundred dashboards that take nothing: requests are answered as before."""
    lookers = [connect(server) for _ in range(200)]
    for looker in lookers:
        looker.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    for looker in lookers:
        assert looker.recv(12) == b"HTTP/1.1 200"
    started_s = CLOCK.now_s()
    assert server.chat().status_code == 200
    assert CLOCK.now_s() - started_s < 3.0
    for looker in lookers:
        looker.close()
    check_unharmed(server, deployment)


def test_a_small_answer_does_not_wait_for_the_other_side(server: Running) -> None:
    """Head and body are two writes: with Nagle's algorithm the second waits 40 ms for the client's acknowledgement."""
    waited_s = []
    with connect(server) as connection:
        for _ in range(10):
            started_s = CLOCK.now_s()
            connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            data = b""
            while not data.endswith(b"}"):
                data += connection.recv(4096)
            waited_s.append(CLOCK.now_s() - started_s)
    assert sorted(waited_s)[5] < 0.03
