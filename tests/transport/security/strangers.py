"""What somebody without a key may try against a listening port: each attack opens plain sockets and returns what it heard."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from collections.abc import Callable

import zmq

from shardwise.transport.security import MAX_FRAME_BYTES, NodeKeys, secure_client

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
NULL_READY = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
Attack = Callable[[int], bytes]  # port -> every byte the server answered beyond its greeting


def _connect(port: int) -> socket.socket:
    connected = socket.create_connection(("127.0.0.1", port), timeout=2)
    connected.settimeout(2)
    return connected


def _hear(connected: socket.socket) -> bytes:
    """All that comes until the server hangs up."""
    heard = b""
    with contextlib.suppress(OSError):
        while data := connected.recv(65536):
            heard += data
    return heard


def _is_closed(connected: socket.socket) -> bool:
    try:
        return connected.recv(1) == b""
    except OSError as error:
        return not isinstance(error, TimeoutError)


def garbage(port: int) -> bytes:
    """Random bytes, HTTP, TLS, and a zero flood."""
    source = random.Random(1)
    for data in (source.randbytes(5000), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", bytes(100_000)):
        with _connect(port) as connected, contextlib.suppress(OSError):
            connected.sendall(data)
            _hear(connected)
    return b""


def huge_frame(port: int) -> bytes:
    """A correct greeting, then frames that announce 2^31 and 2^63 bytes."""
    heard = b""
    for flags, length in ((0x06, 2**31), (0x02, 2**31), (0x06, 2**63 - 1), (0x02, 2**64 - 1)):
        with _connect(port) as connected, contextlib.suppress(OSError):
            connected.sendall(GREETING)
            time.sleep(0.05)
            connected.sendall(struct.pack(">BQ", flags, length) + bytes(2000))
            heard += _hear(connected)[64:]
    return heard


def largest_frame(port: int) -> bytes:
    """The largest frame that is allowed, as the first command of the key exchange, but for its last byte; held."""
    with _connect(port) as connected, contextlib.suppress(OSError):
        connected.sendall(GREETING)
        time.sleep(0.05)
        connected.sendall(struct.pack(">BQ", 0x06, MAX_FRAME_BYTES) + bytes(MAX_FRAME_BYTES - 1))
        return _hear(connected)[64:]
    return b""


def slow_loris(port: int) -> bytes:
    """A greeting at one byte each 50 ms: hung up on long before it is whole."""
    with _connect(port) as connected:
        connected.settimeout(0.05)
        started_s = time.perf_counter()
        for byte in GREETING * 3:
            try:
                connected.sendall(bytes([byte]))
            except OSError:
                break
            with contextlib.suppress(TimeoutError):
                if connected.recv(65536) == b"":
                    break
        assert time.perf_counter() - started_s < 2.5, "the server let a slow greeting go on"
    return b""


def half_open(port: int) -> bytes:
    """Two hundred connections that never say anything; the server hangs up on all of them."""
    opened = [_connect(port) for _ in range(200)]
    for connected in opened:
        _hear(connected)
        assert _is_closed(connected)
        connected.close()
    return b""


def other_mechanism(port: int) -> bytes:
    """ZMTP with NULL and PLAIN, and ZMTP 1.0 and 2.0."""
    heard = b""
    for mechanism in (b"NULL", b"PLAIN"):
        with _connect(port) as connected, contextlib.suppress(OSError):
            connected.sendall(GREETING.replace(b"CURVE".ljust(20, b"\0"), mechanism.ljust(20, b"\0")))
            connected.sendall(
                b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00" + b"\x00\x05hello"
            )
            heard += _hear(connected)[64:]
    for greeting in (b"\x01\x00\x06hello!", b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x01\x05\x00\x00"):
        with _connect(port) as connected, contextlib.suppress(OSError):
            connected.sendall(greeting + b"\x00\x05hello")
            heard += _hear(connected)[12:]
    return heard


def wrong_keys(port: int, server_public: str) -> bytes:
    """A well-behaved CURVE client that is not on the list, and one that does not know the server's key."""
    heard = b""
    with zmq.Context() as context:
        for public in (server_public, NodeKeys.generate().public):
            with context.socket(zmq.DEALER) as dealer:
                secure_client(dealer, NodeKeys.generate(), public)
                dealer.connect(f"tcp://127.0.0.1:{port}")
                dealer.send(b"let me in")
                if dealer.poll(700):
                    heard += dealer.recv()
    return heard


ATTACKS: dict[str, Attack] = {
    "garbage": garbage,
    "huge_frame": huge_frame,
    "largest_frame": largest_frame,
    "slow_loris": slow_loris,
    "half_open": half_open,
    "other_mechanism": other_mechanism,
}
