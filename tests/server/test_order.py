"""Tokens arrive whole and in order, whichever thread writes them, and however slowly they are read."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from shardwise.deploy.deployment import Deployment
from shardwise.server.line import SharedTransport

from .running import CLOCK, Running, running_server
from .scripted import CountingEngine

NUM_TOKENS = 600


def numbers(server: Running, *, n: int, pause_s: float) -> dict[int, list[int]]:
    """What a client sees of a streamed answer that reads a little at a time, by choice."""
    body = json.dumps({"model": "sample", "prompt": "hi", "max_tokens": NUM_TOKENS, "stream": True, "n": n}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    connection.settimeout(60)
    connection.connect((host, int(port)))
    head = "POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    data = b""
    with connection:
        connection.sendall(head.encode() + body)
        while piece := connection.recv(65536):
            data += piece
            CLOCK.sleep(pause_s)
    chunks, rest = [], data.split(b"\r\n\r\n", 1)[1]
    while rest:  # the chunks of the transfer encoding must be whole as well
        size, _, rest = rest.partition(b"\r\n")
        chunks.append(rest[: int(size, 16)])
        assert rest[int(size, 16) :][:2] == b"\r\n"
        rest = rest[int(size, 16) + 2 :]
    events = [line for line in b"".join(chunks).split(b"\n\n") if line]
    assert events.pop() == b"data: [DONE]"
    seen: dict[int, list[int]] = {}
    for event in events:
        choice = json.loads(event.removeprefix(b"data: "))["choices"][0]
        seen.setdefault(choice["index"], []).append(int(choice["text"].split()[0]))
    return seen


CASES = [(1, "", 0.0), (4, "", 0.0), (1, "x" * 8000, 0.002), (3, "x" * 4000, 0.002)]
SLOWER = pytest.param(3, "x" * 4000, 0.004, marks=pytest.mark.soak)


@pytest.mark.parametrize(("n", "filler", "pause_s"), [*CASES, SLOWER])
def test_nothing_is_lost_torn_or_overtaken(deployment: Deployment, n: int, filler: str, pause_s: float) -> None:
    """Also on a server that has answered before."""
    rounds = 1 if 0.0 < pause_s < 0.004 else 2
    with running_server(CountingEngine(deployment, filler=filler)) as server:
        for _ in range(rounds):
            assert numbers(server, n=n, pause_s=pause_s) == {index: list(range(NUM_TOKENS)) for index in range(n)}
        assert server.state.activity.total_generated_tokens == rounds * n * NUM_TOKENS


class Recording:
    """An asyncio transport that keeps what the loop would write."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.written, self.aborted = connection, b"", False

    def get_extra_info(self, name: str) -> Any:
        return self.connection if name == "socket" else None

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.connection.close()

    def abort(self) -> None:
        self.aborted = True


def test_what_the_socket_did_not_take_goes_before_what_follows() -> None:
    async def check() -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        transport = Recording(near)
        shared = SharedTransport(transport, asyncio.get_running_loop())  # type: ignore[arg-type]
        data = bytes(range(256)) * 8192
        before_s = CLOCK.now_s()
        assert shared.write_now(data)  # it has begun to
        assert before_s < shared.passed_s <= CLOCK.now_s()
        assert not shared.write_now(b"later")
        shared.write(b"end")
        taken = len(data) + 3 - len(transport.written)
        assert 0 < taken < len(data)
        assert transport.written == data[taken:] + b"end"
        shared.close()
        far.close()

    asyncio.run(check())


def test_a_descriptor_that_was_given_back_is_not_written_to() -> None:
    async def check() -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        shared = SharedTransport(Recording(near), asyncio.get_running_loop())  # type: ignore[arg-type]
        descriptor = near.fileno()
        shared.close()
        other, another = socket.socketpair()  # takes the same number
        assert descriptor in (other.fileno(), another.fileno())
        assert not shared.write_now(b"a token of somebody else")
        for one in (far, other, another):
            one.close()

    asyncio.run(check())
