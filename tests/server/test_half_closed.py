"""Clients that end their sending half after a request: they are answered, and freed as soon as nobody is left to read."""

from __future__ import annotations

import http.client
import socket

import pytest

from shardwise.deploy.deployment import Deployment

from .running import Running, wait_until
from .test_hostile import chat_bytes, check_unharmed, connect, ends
from .test_wire import answers_of


def half_closed(server: Running, data: bytes) -> socket.socket:
    connection = connect(server)
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
    return connection


def final(data: bytes) -> bytes:
    """Without interim answers."""
    return data.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")


@pytest.mark.parametrize("stream", [True, False])
def test_it_is_answered_to_the_end(server: Running, deployment: Deployment, stream: bool) -> None:
    with half_closed(server, chat_bytes(stream=stream, max_tokens=60)) as connection:
        data = final(ends(connection))
    assert answers_of(data) == [200]
    assert b"connection: close" in data
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")
    check_unharmed(server, deployment)


def test_an_ordinary_client_passes_over_the_interim_answers(server: Running, deployment: Deployment) -> None:
    """Python's own; it reads what `sendall` of another would have."""
    with half_closed(server, chat_bytes(max_tokens=100)) as connection:
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 200
        assert b'"chat.completion"' in answer.read()
    check_unharmed(server, deployment)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_short_ones_are_answered_in_either_version(server: Running, version: bytes) -> None:
    request = b"GET /health/live HTTP/" + version + b"\r\nHost: localhost\r\n\r\n"
    with half_closed(server, request) as connection:
        assert answers_of(final(ends(connection))) == [200]


def test_several_at_once_are_all_answered(server: Running, deployment: Deployment) -> None:
    bodies = [chat_bytes(stream=True, max_tokens=5), chat_bytes(max_tokens=5), chat_bytes(max_tokens=-5)]
    with half_closed(server, b"".join(bodies)) as connection:
        data = final(ends(connection))
    assert answers_of(data) == [200, 200, 400]
    check_unharmed(server, deployment)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("version", "waits"), [("1.1", True), ("1.1", False), ("1.0", True), pytest.param("1.0", False, marks=pytest.mark.soak)]
)
def test_its_other_half_closes_later(server: Running, deployment: Deployment, stream: bool, version: str, waits: bool) -> None:
    """`waits`: behind eight others, so that nothing is written to it."""
    others = [connect(server) for _ in range(8 if waits else 0)]
    for other in others:
        other.sendall(chat_bytes(stream=True, max_tokens=900))
    wait_until(lambda: len(server.state.activity.active) == len(others), 10, "the others to begin")
    tokens = server.state.activity.total_generated_tokens
    request = chat_bytes(stream=stream, max_tokens=900).replace(b"HTTP/1.1", b"HTTP/" + version.encode())
    with half_closed(server, request):
        wait_until(lambda: len(server.state.activity.active) == len(others) + 1, 10, "it to begin")
    wait_until(lambda: len(server.state.activity.active) <= len(others), 3 if version == "1.1" else 5, "it to be forgotten")
    assert waits or server.state.activity.total_generated_tokens - tokens < 700
    for other in others:
        other.close()
    check_unharmed(server, deployment)


def test_what_is_answered_at_once_has_no_interim_answer(server: Running) -> None:
    found = []
    for _ in range(5):
        with half_closed(server, b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n") as connection:
            found.append(ends(connection))
    assert any(data.startswith(b"HTTP/1.1 200") for data in found)  # on a busy machine not each


def test_half_a_request_is_not_waited_for(server: Running, deployment: Deployment) -> None:
    for data in (b"GET /health/live HTT", chat_bytes()[:-5]):
        with half_closed(server, data) as connection:
            connection.settimeout(5)
            assert ends(connection) == b""
    check_unharmed(server, deployment)
