"""ZeroMQ channels: an `Inbox` that many may write to, an `Outbox` to one peer.

A message is [header] or [header, payload part, ...]; parts are at most `MAX_FRAME_BYTES`, so that a stranger cannot make
anybody allocate more. A short payload, a token's row, shares one frame with its header, because every frame is encrypted,
queued and taken for itself: `0xC1` (no header begins so: MessagePack never writes it), the header's length in four bytes
(little endian), header, payload. A header that is longer than a frame (a prompt of 100,000 tokens) goes the same way, cut into
frames. The first message on a connection is a `Hello`; it is answered at once with `Welcome` or
`Refused` (`handshake`), and nothing of a peer that was not welcomed reaches the caller. Sockets belong to the thread that made
them.

**Promises** order per sender; a send never blocks for longer than `SEND_TIMEOUT_S`; malformed messages are counted and
dropped. **Fails when** the port is taken (`UsageError`), the peer is away and the queue is full (`PeerClosed`), the peer
refuses (`CompatibilityError`). **Called by** stage workers, the session driver, probes.
"""

from __future__ import annotations

import errno
import re
from collections import OrderedDict, deque
from dataclasses import dataclass

import zmq

from shardwise.errors import PeerClosed, ProtocolMismatch, UsageError
from shardwise.transport import handshake
from shardwise.transport.handshake import Hello, Refused
from shardwise.transport.messages import AnyMessage, decode, encode
from shardwise.transport.security.allow_list import AllowList
from shardwise.transport.security.keys import NodeKeys
from shardwise.transport.security.sockets import MAX_FRAME_BYTES, MAX_FRAMES, secure_client, secure_server, sender_key
from shardwise.transport.security.watch import HandshakeWatch

SEND_TIMEOUT_S = 10.0
QUEUE_MESSAGES = 2000
LINGER_MS = 200
MAX_PEERS = 4096
MAX_REFUSALS = 64
_HELLO_TAG = b"\xa1t\xa5hello"  # how MessagePack writes the tag of a Hello, its first field
_REPLY_TAG = re.compile(rb"\xa1t\xa7(welcome|refused)")
SHORT_PAYLOAD_BYTES = 64 * 1024
_TOGETHER_START = b"\xc1"
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
DRIVER = -1  # `Hello.stage` of the session driver


@dataclass(frozen=True, slots=True)
class Envelope:
    """A received message; `peer` is the sender's routing id, for replies; `stage` is what it said to be."""

    message: AnyMessage
    payload: memoryview | None
    peer: bytes
    stage: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A peer that was turned away; `hello` is None where it could not be read."""

    hello: Hello | None
    refused: Refused


@dataclass(frozen=True, slots=True)
class Peer:
    """A welcomed sender."""

    stage: int
    public_key: str  # "" without encryption


def _joined(parts: list[memoryview]) -> memoryview | None:
    """The parts of a payload as one; a single part is not copied."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    return memoryview(b"".join(parts))


def framed(header: bytes, payload: bytes | memoryview | None) -> list[bytes | memoryview]:
    """The frames of a message."""
    if len(header) > MAX_FRAME_BYTES:
        return list(split_payload(together(header, payload if payload is not None else b"")))
    if payload is None:
        return [header]
    return [together(header, payload)] if len(payload) <= SHORT_PAYLOAD_BYTES else [header, *split_payload(payload)]


def together(header: bytes, payload: bytes | memoryview) -> bytes:
    """One frame with both."""
    return b"".join((_TOGETHER_START, len(header).to_bytes(4, "little"), header, payload))


def _taken_apart(frame: memoryview) -> tuple[memoryview, memoryview]:
    """Header and payload of a frame that holds both. A length that lies leaves a header that cannot be decoded."""
    end = 5 + int.from_bytes(frame[1:5], "little")
    return frame[5:end], frame[end:]


def _prepare(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.SNDTIMEO, round(SEND_TIMEOUT_S * 1000))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.IPV6, 1)


def split_payload(payload: bytes | memoryview) -> list[memoryview]:
    """Parts of at most `MAX_FRAME_BYTES`."""
    view = memoryview(payload).cast("B")
    return [view[i : i + MAX_FRAME_BYTES] for i in range(0, len(view), MAX_FRAME_BYTES)] or [view]


class Inbox:
    """A bound socket that receives from many senders."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        hello: Hello,
        keys: NodeKeys | None = None,
        allowed: AllowList | None = None,
    ) -> None:
        """`allowed`: who may be which stage, and whose messages are still read (the context's `Authenticator` has the same)."""
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        if keys is not None:
            secure_server(self.socket, keys)
        _prepare(self.socket)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.socket.close(linger=0)
            what = "the port is in use" if error.errno == errno.EADDRINUSE else str(error)
            raise UsageError(
                f"cannot listen: {what}", where=address, hint="choose another port, or 0 for any free one"
            ) from error
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.received_bytes = 0
        self.num_malformed = 0
        self.num_refused = 0
        self.refusals: deque[Refusal] = deque(maxlen=MAX_REFUSALS)  # the latest, for whoever waits for one of these peers
        self._hello = hello
        self._allowed = allowed
        self._seen_bans = 0
        self._welcomed: OrderedDict[bytes, Peer] = OrderedDict()  # by routing id

    def set_hello(self, hello: Hello) -> None:
        """Change what this side holds. A new epoch fences every stage that does not say hello again."""
        if hello.epoch != self._hello.epoch:
            self._welcomed = OrderedDict((i, peer) for i, peer in self._welcomed.items() if peer.stage == DRIVER)
        self._hello = hello

    def wait(self, timeout_s: float) -> bool:
        """True as soon as something can be received."""
        return bool(self.socket.poll(max(0, round(timeout_s * 1000)), zmq.POLLIN))

    def receive(self) -> Envelope | None:
        """The next message of a welcomed peer without waiting, or None."""
        while int(self.socket.getsockopt(_EVENTS)) & _POLLIN:  # asking is cheaper than an exception
            try:
                peer = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            parts = [self.socket.recv(copy=False)]  # a message is there as a whole, or not at all
            while parts[-1].more:
                parts.append(self.socket.recv(copy=False))
            envelope = self._open(peer, parts)
            if envelope is not None:
                return envelope
        return None

    def _open(self, peer: bytes, parts: list[zmq.Frame]) -> Envelope | None:
        if len(parts) >= MAX_FRAMES:
            self.num_malformed += 1
            return None
        header = parts[0].buffer
        if _HELLO_TAG in bytes(header[:16]):
            self._greet(peer, parts[0])
            return None
        self._drop_banned()
        if peer not in self._welcomed:
            if handshake.is_hello(header):  # of another version, or broken: it gets an answer all the same
                self._greet(peer, parts[0])
            self.num_refused += 1
            return None
        payload: memoryview | None
        if header[:1] == _TOGETHER_START:
            header, payload = _taken_apart(header if len(parts) == 1 else memoryview(b"".join(part.buffer for part in parts)))
        else:
            payload = _joined([part.buffer for part in parts[1:]])
        try:
            message = decode(header)
        except ProtocolMismatch:
            self.num_malformed += 1
            return None
        self.received_bytes += len(header) + (len(payload) if payload is not None else 0)
        return Envelope(message, payload, peer, self._welcomed[peer].stage)

    def _drop_banned(self) -> None:
        """A key that was banned or forgotten since is dead at once, whatever connection it has."""
        if self._allowed is not None and self._seen_bans != self._allowed.num_removals:
            self._seen_bans = self._allowed.num_removals
            self._welcomed = OrderedDict((i, p) for i, p in self._welcomed.items() if self._allowed.permits(p.public_key))

    def _greet(self, peer: bytes, frame: zmq.Frame) -> None:
        hello, public_key = handshake.read_hello(frame.buffer), sender_key(frame)
        answer = hello if isinstance(hello, Refused) else handshake.answer(hello, self._hello)
        if isinstance(hello, Hello) and self._allowed is not None:
            answer = handshake.refuse_impostor(hello, self._allowed.find(public_key)) or answer
        if isinstance(answer, Refused) or isinstance(hello, Refused):
            self.num_refused += 1
            self._welcomed.pop(peer, None)
            if isinstance(answer, Refused):
                self.refusals.append(Refusal(hello if isinstance(hello, Hello) else None, answer))
        else:
            self._welcomed[peer] = Peer(hello.stage, public_key)
            while len(self._welcomed) > MAX_PEERS:
                self._welcomed.popitem(last=False)
        self.socket.send_multipart([peer, handshake.encode(answer)])

    def reply(self, peer: bytes, message: AnyMessage) -> None:
        """Answer on the sender's own connection; a peer that is gone is ignored by ZeroMQ."""
        self.socket.send_multipart([peer, encode(message)])

    def close(self) -> None:
        self.socket.close(linger=LINGER_MS)


class Outbox:
    """A connection to one peer's inbox. Connecting is lazy: messages wait until the peer is there."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        hello: Hello,
        keys: NodeKeys | None = None,
        peer_key: str = "",
    ) -> None:
        self.address = address
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._watch: HandshakeWatch | None = None
        if keys is not None:
            secure_client(self.socket, keys, peer_key)
            self._watch = HandshakeWatch(self.socket)
        _prepare(self.socket)
        self.socket.connect(address)
        self.sent_bytes = 0
        self.welcomed = False
        self.greet(hello)

    def greet(self, hello: Hello) -> None:
        """Say hello (again); `receive` sees the answer."""
        self.welcomed = False
        self._send([handshake.encode(hello)])

    def check(self) -> None:
        """Raise `AuthenticationFailed` if the peer does not let this side in: ZeroMQ itself would try again for ever."""
        if self._watch is not None:
            self._watch.check(peer=self.address)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def send(self, message: AnyMessage, payload: bytes | memoryview | None = None, *, required: bool = True) -> int:
        """Send; returns the bytes; raises `PeerClosed` where the peer takes nothing within the deadline.

        What is not `required` is dropped (0 bytes) where it cannot be sent at once.
        """
        header = encode(message)
        if not required and not self.socket.poll(0, zmq.POLLOUT):
            return 0
        frames = framed(header, payload)
        self._send(frames)
        size = sum(map(len, frames))
        self.sent_bytes += size
        return size

    def _send(self, frames: list[bytes | memoryview]) -> None:
        try:
            for frame in frames[:-1]:
                self.socket.send(frame, zmq.SNDMORE)
            self.socket.send(frames[-1])
        except zmq.Again as error:
            raise PeerClosed("the peer takes no messages", where=self.address) from error

    def receive(self) -> AnyMessage | None:
        """The next reply without waiting, or None; a refusal raises `CompatibilityError` with every difference."""
        while True:
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if (_REPLY_TAG.search(data[:16]) or not self.welcomed) and handshake.is_reply(data):
                handshake.read_reply(data, where=self.address)
                self.welcomed = True
                self._stop_watching()
                continue
            return decode(data)

    def close(self, linger_ms: int = LINGER_MS) -> None:
        self._stop_watching()
        self.socket.close(linger=linger_ms)
