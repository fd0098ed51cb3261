"""Weights between nodes: a server that hands out pieces by digest, and the `PieceSource` that asks it.

    PeerPieces (one connection a reader thread) -- Have, Read --> PieceServer -- Has, Data + bytes, Missing --> PeerPieces

One request is under way on a connection, so the server never queues more than one reply for it. Both ends speak CURVE; a key that
is only an invite gets nothing. **Promises** a request for what is not there is answered, never ignored; a revoked peer's next
request is dropped; nothing that a peer sends makes the server read outside the pieces it was given. **Fails with**
`ConnectFailed`, `ConnectTimeout`, `AuthenticationFailed`, `ReplyTimeout`, `ProtocolMismatch`. The bytes need no trust: the
transfer hashes them. **Called by** deploy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from itertools import count
from types import TracebackType

import msgspec
import zmq

from shardwise.clock import Clock, SystemClock
from shardwise.errors import CorruptWeightsError, NetworkError, ProtocolMismatch, ReplyTimeout, ShardwiseError
from shardwise.records import Record
from shardwise.shards.pieces import PEER, PieceSource
from shardwise.transport.security.allow_list import AllowList
from shardwise.transport.security.keys import NodeKeys
from shardwise.transport.security.sockets import secure_client, secure_server, sender_key
from shardwise.transport.security.watch import HandshakeWatch

MAX_READ_BYTES = 512 * 1024 - 1024  # with a little room in a frame
MAX_DIGESTS = 5000  # in one question
_MAX_HEADER_BYTES = 400 * 1024
_POLL_MS = 200


class Have(Record, tag="have?", tag_field="t"):
    """Which of these pieces are there?"""

    request: int
    digests: tuple[str, ...]


class Read(Record, tag="read?", tag_field="t"):
    """Bytes of a piece."""

    request: int
    digest: str
    offset_bytes: int
    num_bytes: int


class Has(Record, tag="has", tag_field="t"):
    """The pieces that are there."""

    request: int
    digests: tuple[str, ...]


class Data(Record, tag="data", tag_field="t"):
    """The bytes are the next frame."""

    request: int


class Missing(Record, tag="missing", tag_field="t"):
    """It is not there, or not so long."""

    request: int
    message: str


_encoder = msgspec.msgpack.Encoder()
_request: msgspec.msgpack.Decoder[Have | Read] = msgspec.msgpack.Decoder(Have | Read)
_reply: msgspec.msgpack.Decoder[Has | Data | Missing] = msgspec.msgpack.Decoder(Has | Data | Missing)
_UNREADABLE = (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError, OverflowError)


class PieceServer:
    """Serves what `source` returns at the time of a request, in a thread of its own. The context needs an `Authenticator`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        source: Callable[[], PieceSource],
        *,
        keys: NodeKeys,
        allowed: AllowList,
    ) -> None:
        self.sent_bytes = 0
        self.num_dropped = 0
        self._source, self._allowed = source, allowed
        self._socket = context.socket(zmq.ROUTER)
        secure_server(self._socket, keys)
        self._socket.setsockopt(zmq.SNDHWM, 16)
        self._socket.setsockopt(zmq.RCVHWM, 16)
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwise-pieces", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._stop.set()
        self._thread.join()
        self._socket.close(0)

    def __enter__(self) -> PieceServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(_POLL_MS):
                frames = self._socket.recv_multipart(copy=False)
                if len(frames) != 2 or not self._may_ask(frames[1]):
                    self.num_dropped += 1
                    continue
                self._socket.send_multipart([frames[0].bytes, *self._answer(frames[1].bytes)])

    def _may_ask(self, frame: zmq.Frame) -> bool:
        entry = self._allowed.find(sender_key(frame))
        return entry is not None and entry.role != "invite" and len(frame) <= _MAX_HEADER_BYTES

    def _answer(self, data: bytes) -> list[bytes]:
        try:
            request = _request.decode(data)
        except _UNREADABLE:
            self.num_dropped += 1
            return [_encoder.encode(Missing(request=0, message="not a request"))]
        try:
            if isinstance(request, Have):
                found = tuple(sorted(self._source().holds(request.digests[:MAX_DIGESTS])))
                return [_encoder.encode(Has(request=request.request, digests=found))]
            return self._read(request)
        except ShardwiseError as error:
            return [_encoder.encode(Missing(request=request.request, message=error.message))]

    def _read(self, request: Read) -> list[bytes]:
        if not 0 < request.num_bytes <= MAX_READ_BYTES or request.offset_bytes < 0:
            return [_encoder.encode(Missing(request=request.request, message=f"at most {MAX_READ_BYTES} bytes at once"))]
        data = self._source().read(request.digest, request.offset_bytes, request.num_bytes)
        self.sent_bytes += len(data)
        return [_encoder.encode(Data(request=request.request)), data]


class PeerPieces:
    """The pieces of another node; one connection for each thread that reads."""

    rank = PEER

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        keys: NodeKeys,
        peer_public: str,
        timeout_s: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        self.name = address
        self._context, self._keys, self._peer_public = context, keys, peer_public
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self._local = threading.local()
        self._lock = threading.Lock()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._numbers = count(1)

    def holds(self, digests: Collection[str]) -> set[str]:
        out: set[str] = set()
        wanted = sorted(digests)
        for start in range(0, len(wanted), MAX_DIGESTS):
            part = tuple(wanted[start : start + MAX_DIGESTS])
            reply, _ = self._ask(Have(request=next(self._numbers), digests=part))
            if not isinstance(reply, Has):
                raise ProtocolMismatch("the peer did not answer the question", where=self.name)
            out.update(reply.digests)
        return out

    def read(self, digest: str, offset_bytes: int, num_bytes: int) -> bytes:
        request = Read(request=next(self._numbers), digest=digest, offset_bytes=offset_bytes, num_bytes=num_bytes)
        reply, data = self._ask(request)
        if not isinstance(reply, Data):
            message = reply.message if isinstance(reply, Missing) else "the peer did not answer the question"
            raise CorruptWeightsError(message[:200], where=self.name, expected=digest, actual="nothing")
        return data

    def close(self) -> None:
        """Close all connections; no thread may be reading."""
        with self._lock:
            for socket in self._sockets:
                socket.close(0)
            self._sockets.clear()
        self._local = threading.local()

    def __enter__(self) -> PeerPieces:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self, request: Have | Read) -> tuple[Has | Data | Missing, bytes]:
        socket = self._connection()
        deadline_s = self._clock.now_s() + self._timeout_s
        try:
            socket.send(_encoder.encode(request), zmq.NOBLOCK)
            while True:
                left_ms = round((deadline_s - self._clock.now_s()) * 1000)
                if left_ms <= 0 or not socket.poll(left_ms):
                    raise ReplyTimeout(f"no reply within {self._timeout_s:g} s", where=self.name)
                reply, data = self._decode(socket.recv_multipart())
                if reply.request == request.request:
                    return reply, data
        except (zmq.ZMQError, NetworkError) as error:
            self._forget(socket)
            if isinstance(error, NetworkError):
                raise
            raise ReplyTimeout(f"the connection broke: {error}", where=self.name) from error

    def _decode(self, frames: list[bytes]) -> tuple[Has | Data | Missing, bytes]:
        try:
            reply = _reply.decode(frames[0])
        except _UNREADABLE as error:
            raise ProtocolMismatch(f"the peer's reply is not readable: {error}", where=self.name) from error
        return reply, frames[1] if len(frames) == 2 else b""

    def _connection(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] | None = getattr(self._local, "socket", None)
        if socket is None:
            socket = self._context.socket(zmq.DEALER)
            try:
                secure_client(socket, self._keys, self._peer_public)
                with HandshakeWatch(socket, clock=self._clock) as watch:
                    socket.connect(self.name)
                    watch.wait(self._timeout_s, peer=self.name)
            except BaseException:
                socket.close(0)
                raise
            self._local.socket = socket
            with self._lock:
                self._sockets.append(socket)
        return socket

    def _forget(self, socket: zmq.Socket[bytes]) -> None:
        self._local.socket = None
        with self._lock:
            if socket in self._sockets:
                self._sockets.remove(socket)
        socket.close(0)
