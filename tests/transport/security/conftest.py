"""One context a test, and a secured echo server in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import zmq

from shardwise.transport.security import (
    AllowList,
    Authenticator,
    NodeKeys,
    SocketLimits,
    secure_client,
    secure_server,
    sender_key,
)


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


class EchoServer:
    """A ROUTER with a key and an allow-list; sends every message from a key that is still allowed back."""

    def __init__(self, context: zmq.Context, *, limits: SocketLimits | None = None) -> None:
        self.context = context
        self.keys = NodeKeys.generate()
        self.allowed = AllowList()
        self.authenticator = Authenticator(context, self.allowed)
        self.num_received = 0
        self._socket = context.socket(zmq.ROUTER)
        secure_server(self._socket, self.keys, limits=limits or SocketLimits())
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{self.port}"
        self._clients: list[zmq.Socket] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(20):
                frames = self._socket.recv_multipart(copy=False)
                self.num_received += 1
                if self.allowed.permits(sender_key(frames[-1])):
                    self._socket.send_multipart(frames)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for socket in [self._socket, *self._clients]:
            socket.close(0)
        self.authenticator.close()

    def plain(self, kind: int) -> zmq.Socket:
        """A socket without encryption."""
        socket = self.context.socket(kind)
        self._clients.append(socket)
        return socket

    def client(self, keys: NodeKeys, *, server_public: str = "", connect: bool = True) -> zmq.Socket:
        """A DEALER that speaks CURVE with these keys."""
        socket = self.plain(zmq.DEALER)
        secure_client(socket, keys, server_public or self.keys.public)
        if connect:
            socket.connect(self.address)
        return socket

    def friend(self) -> zmq.Socket:
        """An allowed client that has had an answer."""
        keys = NodeKeys.generate()
        self.allowed.allow(keys.public, "friend")
        socket = self.client(keys)
        ask(socket, b"hello")
        return socket


def ask(socket: zmq.Socket, message: bytes, timeout_ms: int = 5000) -> bytes:
    """Send and wait for the echo."""
    socket.send(message)
    assert socket.poll(timeout_ms), "no answer"
    return socket.recv()


@pytest.fixture
def server(context: zmq.Context) -> Iterator[EchoServer]:
    made = EchoServer(context)
    yield made
    made.close()
