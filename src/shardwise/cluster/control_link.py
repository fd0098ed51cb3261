"""Control messages over ZeroMQ with CURVE: a server that answers, a client that asks with a deadline.

**Promises** a request is answered or fails within its deadline; the sender's proved key comes with each request; what
is malformed is counted and answered with `Failed`. **Fails with** `UsageError` (port in use), `AuthenticationFailed`,
`ConnectFailed`, `ConnectTimeout`, `ReplyTimeout`, and what the other side answered. **Called by** daemons, command line.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import zmq

from shardwise.cluster.control import Failed, Reply, Request, decode_reply, decode_request, encode
from shardwise.errors import ConnectFailed, NetworkError, ReplyTimeout, ShardwiseError, UsageError
from shardwise.transport.security import (
    AllowList,
    Authenticator,
    HandshakeWatch,
    NodeKeys,
    secure_client,
    secure_server,
    sender_key,
)

Q = TypeVar("Q")
A = TypeVar("A")
CONNECT_TIMEOUT_S = 4.0


@dataclass(frozen=True)
class Codec(Generic[Q, A]):
    """Questions and answers of one kind of conversation."""

    encode: Callable[[Any], bytes]
    decode_request: Callable[[bytes | memoryview], Q]
    decode_reply: Callable[[bytes | memoryview], A]
    failed: Callable[[ShardwiseError], A]
    error: Callable[[A], ShardwiseError | None]


class MessageServer(Generic[Q, A]):
    """A socket on `addresses`. `serve_once` is called in a loop by its owner's one thread."""

    def __init__(self, addresses: Iterable[str], keys: NodeKeys, allowed: AllowList, codec: Codec[Q, A]) -> None:
        self._codec = codec
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = Authenticator(self._context, allowed)
        self._socket = self._context.socket(zmq.ROUTER)
        self._allowed = allowed
        self.num_malformed = 0
        secure_server(self._socket, keys)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.SNDTIMEO, 1000)
        for address in addresses:
            self._bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def serve_once(self, handler: Callable[[Q, str], A], timeout_s: float) -> None:
        """Answer what has come within `timeout_s`. The handler gets the request and the sender's public key."""
        if not self._socket.poll(max(1, round(timeout_s * 1000))):
            return
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(frames) != 2 or not self._allowed.permits(sender_key(frames[1])):  # revoked since it connected
                self.num_malformed += 1
                continue
            self._socket.send_multipart([frames[0].bytes, self._codec.encode(self._answer(handler, frames[1]))])

    def close(self) -> None:
        """Send what is on its way, then close."""
        self._socket.close(linger=500)
        self._authenticator.close()
        self._context.destroy(linger=0)

    def _answer(self, handler: Callable[[Q, str], A], frame: zmq.Frame) -> A:
        try:
            return handler(self._codec.decode_request(frame.bytes), sender_key(frame))
        except ShardwiseError as error:
            self.num_malformed += 1
            return self._codec.failed(error)

    def _bind(self, address: str) -> None:
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            self._authenticator.close()
            self._context.destroy(linger=0)
            what = "the port is in use" if error.errno == errno.EADDRINUSE else str(error)
            raise UsageError(f"cannot listen: {what}", where=address, hint="choose another with --port") from error


class MessageClient(Generic[Q, A]):
    """A connection to one server, made on first use and again after a failure. One thread at a time."""

    def __init__(self, addresses: Iterable[str], keys: NodeKeys, server_public: str, codec: Codec[Q, A]) -> None:
        self._codec = codec
        self.addresses = tuple(addresses)
        self._keys = keys
        self._server_public = server_public
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None

    def ask(self, request: Q, *, timeout_s: float = 5.0) -> A:
        """The answer; one that is an error is raised."""
        socket = self._socket or self._connect(min(timeout_s, CONNECT_TIMEOUT_S))
        try:
            socket.send(self._codec.encode(request), zmq.NOBLOCK)
            if not socket.poll(round(timeout_s * 1000)):
                raise ReplyTimeout(f"no answer within {timeout_s:g} s", where=", ".join(self.addresses))
            reply = self._codec.decode_reply(socket.recv(zmq.NOBLOCK))
        except zmq.ZMQError as error:
            self._drop()
            raise ConnectFailed(f"the connection broke: {error}", where=", ".join(self.addresses)) from error
        except NetworkError:
            self._drop()
            raise
        failure = self._codec.error(reply)
        if failure is not None:
            raise failure
        return reply

    def close(self) -> None:
        """May be called twice."""
        self._drop()
        self._context.destroy(linger=0)

    def _connect(self, timeout_s: float) -> zmq.Socket[bytes]:
        """The first address that lets us in; otherwise the last failure."""
        failure: NetworkError | None = None
        for address in self.addresses:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IPV6, 1)
            secure_client(socket, self._keys, self._server_public)
            try:
                with HandshakeWatch(socket) as watch:
                    socket.connect(address)
                    watch.wait(timeout_s, peer=address)
            except NetworkError as error:
                socket.close(linger=0)
                failure = error
                continue
            except zmq.ZMQError as error:
                socket.close(linger=0)
                raise UsageError(f"not an address: {address}", where="cluster", hint="tcp://HOST:PORT") from error
            self._socket = socket
            return socket
        raise failure or UsageError("the cluster has no address", where="cluster", hint="join again with a new invite")

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=200)
            self._socket = None


def _error(reply: Reply) -> ShardwiseError | None:
    return reply.error() if isinstance(reply, Failed) else None


CONTROL: Codec[Request, Reply] = Codec(encode, decode_request, decode_reply, Failed.of, _error)


class ControlServer(MessageServer[Request, Reply]):
    """Answers the cluster's control messages."""

    def __init__(self, addresses: Iterable[str], keys: NodeKeys, allowed: AllowList) -> None:
        super().__init__(addresses, keys, allowed, CONTROL)


class ControlClient(MessageClient[Request, Reply]):
    """Asks the cluster's control questions."""

    def __init__(self, addresses: Iterable[str], keys: NodeKeys, server_public: str) -> None:
        super().__init__(addresses, keys, server_public, CONTROL)
