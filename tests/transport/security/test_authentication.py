"""Who gets in over real sockets, and that the reason is told within a second."""

from __future__ import annotations

import logging
import time

import pytest
import zmq

from shardwise.errors import AuthenticationFailed, ConnectFailed, UsageError
from shardwise.transport.security import AllowList, Authenticator, HandshakeWatch, NodeKeys, secure_client, secure_server
from tests.transport.security.conftest import EchoServer, ask

VERDICT_S = 1.0


def verdict(server: EchoServer, socket: zmq.Socket, error: type[Exception], text: str) -> float:
    with HandshakeWatch(socket) as watch:
        started_s = time.perf_counter()
        socket.connect(server.address)
        with pytest.raises(error, match=text):
            watch.wait(5.0, peer=server.address)
        return time.perf_counter() - started_s


def test_an_allowed_key_gets_in(server: EchoServer) -> None:
    keys = NodeKeys.generate()
    server.allowed.allow(keys.public, "friend")
    socket = server.client(keys, connect=False)
    with HandshakeWatch(socket) as watch:
        socket.connect(server.address)
        watch.wait(5.0)
    assert ask(socket, b"ping") == b"ping"


def test_an_unknown_key_is_told_so_at_once(server: EchoServer, caplog: pytest.LogCaptureFixture) -> None:
    keys = NodeKeys.generate()
    with caplog.at_level(logging.DEBUG):
        took_s = verdict(server, server.client(keys, connect=False), AuthenticationFailed, "does not allow this node's key")
    assert took_s < VERDICT_S
    assert server.authenticator.num_refused >= 1
    assert keys.public not in caplog.text
    assert keys.secret not in caplog.text


def test_a_wrong_server_key_is_told_so(server: EchoServer) -> None:
    keys = NodeKeys.generate()
    server.allowed.allow(keys.public, "friend")
    socket = server.client(keys, server_public=NodeKeys.generate().public, connect=False)
    assert verdict(server, socket, AuthenticationFailed, "hung up during the key exchange") < VERDICT_S


def test_nobody_listening_is_told_apart(server: EchoServer) -> None:
    socket = server.client(NodeKeys.generate(), connect=False)
    with HandshakeWatch(socket) as watch:
        socket.connect("tcp://127.0.0.1:1")
        with pytest.raises(ConnectFailed):
            watch.wait(0.5)


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ, zmq.ROUTER])
def test_a_peer_without_encryption_gets_nothing(server: EchoServer, kind: int) -> None:
    socket = server.plain(kind)
    with HandshakeWatch(socket) as watch:
        socket.connect(server.address)
        with pytest.raises(AuthenticationFailed):
            watch.wait(1.0)
    assert server.num_received == 0


def test_without_an_authenticator_everybody_is_refused(context: zmq.Context) -> None:
    """Fail closed: libzmq's default would let anybody in who knows the server's public key."""
    keys, friend = NodeKeys.generate(), NodeKeys.generate()
    allowed = AllowList()
    allowed.allow(friend.public, "friend")
    Authenticator(context, allowed).close()
    with context.socket(zmq.ROUTER) as listening, context.socket(zmq.DEALER) as dealer:
        secure_server(listening, keys)
        secure_client(dealer, friend, keys.public)
        dealer.connect(f"tcp://127.0.0.1:{listening.bind_to_random_port('tcp://127.0.0.1')}")
        dealer.send(b"hello")
        assert not listening.poll(700)


def test_one_authenticator_a_context(server: EchoServer) -> None:
    with pytest.raises(UsageError, match="already has an authenticator"):
        Authenticator(server.context, AllowList())


def test_revoking_kills_an_open_connection(server: EchoServer) -> None:
    keys = NodeKeys.generate()
    server.allowed.allow(keys.public, "nas")
    socket = server.client(keys)
    assert ask(socket, b"before") == b"before"
    server.allowed.revoke("nas")
    socket.send(b"after")
    assert not socket.poll(300)
    again = server.client(keys, connect=False)
    assert verdict(server, again, AuthenticationFailed, "does not allow this node's key") < VERDICT_S
