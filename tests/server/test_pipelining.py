"""Requests that come before the last one is answered: they wait their turn, and who hangs up wants none of them any more."""

from __future__ import annotations

import contextlib
import socket
import struct

import pytest

from shardwise.deploy.deployment import Deployment
from shardwise.server import protocol

from .running import CLOCK, Running, wait_until
from .test_hostile import chat_bytes, check_unharmed, connect, ends


def hang_up(connection: socket.socket, how: str) -> None:
    """With the answer half read, as most do; or at once, with a reset."""
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_who_hangs_up_ends_what_runs_and_what_waits(
    server: Running, deployment: Deployment, how: str, stream: bool, together: bool
) -> None:
    begun, tokens = server.state.activity.total_requests, server.state.activity.total_generated_tokens
    connection = connect(server)
    one = chat_bytes(stream=stream, max_tokens=800)
    connection.sendall(one * 5 if together else one)
    if stream:
        assert connection.recv(12) == b"HTTP/1.1 200"
    wait_until(lambda: server.state.activity.active, 10, "the first to run")
    if not together:
        for _ in range(4):
            connection.sendall(one)
            CLOCK.sleep(0.05)  # each alone: nothing tells that the server has read it
    hang_up(connection, how)
    waited_s = wait_until(lambda: not any(stage.sessions for stage in deployment.stats()), 20, "all KV to be freed")
    check_unharmed(server, deployment)
    assert server.state.activity.total_requests - begun == 2  # the first, and the check's
    assert server.state.activity.total_generated_tokens - tokens < 600, f"freed after {waited_s:.1f} s"


def test_no_more_than_a_few_wait(server: Running, deployment: Deployment) -> None:
    """Each holds up to a head in memory."""
    with connect(server) as connection:
        connection.sendall(
            chat_bytes(max_tokens=5) + b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n" * protocol.MAX_WAITING
        )
        data = b""
        while data.count(b"HTTP/1.1 200") < 1 + protocol.MAX_WAITING:
            data += connection.recv(65536)
    with connect(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(chat_bytes(max_tokens=800) + b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5000)
        assert ends(connection) == b""
    check_unharmed(server, deployment)
