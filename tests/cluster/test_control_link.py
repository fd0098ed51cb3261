"""Control messages over real sockets: keys, garbage, deadlines, several addresses."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster import control
from shardwise.cluster.control import Done, DrainRequest, InviteMade, ListRequest, Reply, Request
from shardwise.cluster.control_link import ControlClient, ControlServer
from shardwise.errors import AuthenticationFailed, ConnectFailed, ProtocolMismatch, ReplyTimeout, UsageError
from shardwise.transport.security import AllowList, NodeKeys, secure_client
from tests.cluster.ports import free_port


class Served:
    """A server in a thread; it answers with the key it was asked by, and is silent to `DrainRequest(name="wait")`."""

    def __init__(self) -> None:
        self.keys, self.guest, self.allowed = NodeKeys.generate(), NodeKeys.generate(), AllowList()
        self.allowed.allow(self.guest.public, "guest")
        self.server = ControlServer(["tcp://127.0.0.1:*"], self.keys, self.allowed)
        self.block = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._over.is_set():
            self.server.serve_once(self._answer, 0.05)

    def _answer(self, request: Request, sender: str) -> Reply:
        if isinstance(request, DrainRequest):
            if request.name == "wait":
                self.block.wait(5)
                return Done()
            raise UsageError(f"no node '{request.name}'", where="drain", hint="try another")
        return InviteMade(invite=sender)

    def client(self, keys: NodeKeys | None = None, *more: str) -> ControlClient:
        return ControlClient([*more, self.server.address], keys or self.guest, self.keys.public)

    def close(self) -> None:
        self.block.set()
        self._over.set()
        self._thread.join(timeout=10)
        self.server.close()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


def test_an_answer_comes_with_the_proved_key(served: Served) -> None:
    client = served.client()
    for _ in range(3):
        assert client.ask(ListRequest()) == InviteMade(invite=served.guest.public)
    client.close()
    client.close()


def test_an_error_is_the_same_error_on_the_other_side(served: Served) -> None:
    client = served.client()
    with pytest.raises(UsageError) as caught:
        client.ask(DrainRequest(name="attic"))
    assert caught.value.one_line() == "no node 'attic' (drain); try another"
    client.close()


def test_strangers_and_wrong_servers_are_told_apart_from_silence(served: Served) -> None:
    stranger = served.client(NodeKeys.generate())
    with pytest.raises(AuthenticationFailed):
        stranger.ask(ListRequest(), timeout_s=3)
    stranger.close()
    nobody = ControlClient([f"tcp://127.0.0.1:{free_port()}"], served.guest, served.keys.public)
    with pytest.raises(ConnectFailed):
        nobody.ask(ListRequest(), timeout_s=0.5)
    nobody.close()


def test_the_next_address_is_tried(served: Served) -> None:
    client = served.client(None, f"tcp://127.0.0.1:{free_port()}")
    assert isinstance(client.ask(ListRequest(), timeout_s=1), InviteMade)
    client.close()


def test_silence_ends_at_the_deadline_and_a_late_answer_is_not_taken_for_the_next(served: Served) -> None:
    client = served.client()
    with pytest.raises(ReplyTimeout):
        client.ask(DrainRequest(name="wait"), timeout_s=0.3)
    served.block.set()
    assert client.ask(ListRequest()) == InviteMade(invite=served.guest.public)
    client.close()


def test_a_revoked_key_is_dead_on_an_open_connection(served: Served) -> None:
    client = served.client()
    client.ask(ListRequest())
    served.allowed.revoke("guest")
    with pytest.raises(ReplyTimeout):
        client.ask(ListRequest(), timeout_s=0.3)
    client.close()


def test_garbage_from_a_known_key_is_answered_and_harms_nothing(served: Served) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    rough = context.socket(zmq.DEALER)
    secure_client(rough, served.guest, served.keys.public)
    rough.connect(served.server.address)
    rough.send(b"\xff" * 100)
    assert rough.poll(3000)
    with pytest.raises(ProtocolMismatch):
        raise control.decode_reply(rough.recv()).error()  # type: ignore[union-attr]
    rough.send_multipart([b"a", b"b", b"c"])
    rough.close(0)
    context.destroy(0)
    client = served.client()
    assert isinstance(client.ask(ListRequest()), InviteMade)
    client.close()


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match="the port is in use"):
            ControlServer([f"tcp://127.0.0.1:{port}"], NodeKeys.generate(), AllowList())


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    for decode in (control.decode_request, control.decode_reply):
        with contextlib.suppress(ProtocolMismatch):
            decode(data)
