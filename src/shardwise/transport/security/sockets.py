"""CURVE on a ZeroMQ socket, and the limits that hold before a peer has proved who it is.

Call before `bind` or `connect`. **Promises** after `secure_server` a stranger can hold a connection for `handshake_timeout_s`
and send one frame of at most `max_frame_bytes` (libzmq drops the connection when a frame's header announces more, before
allocating), and gets nothing back; without a running `Authenticator` nobody gets in.
**Fails when** libzmq has no CURVE (`MissingExtraError`).
**Called by** the channel.
"""

from __future__ import annotations

import zmq

from shardwise.errors import MissingExtraError, pip_command
from shardwise.records import Record
from shardwise.transport.security.keys import NodeKeys, check_public_key

ZAP_DOMAIN = b"shardwise"
# What one frame may hold. CURVE adds 33 bytes to it on the wire (flags 1, nonce 8, box 16, header 8).
MAX_FRAME_BYTES = 512 * 1024
MAX_FRAMES = 4096  # of one message: a receiver refuses more, so a message is at most 2 GiB
_CURVE_OVERHEAD_BYTES = 64


class SocketLimits(Record):
    """What a peer may cost before and after authentication."""

    max_frame_bytes: int = MAX_FRAME_BYTES
    handshake_timeout_s: float = 0.9
    connect_timeout_s: float = 5.0
    max_backlog: int = 64  # connections that the kernel has taken and libzmq has not
    heartbeat_s: float = 0.0  # 0 = none; a peer that is silent for three of them is dropped


DEFAULT_LIMITS = SocketLimits()


def require_curve() -> None:
    """Raise unless libzmq was built with CURVE."""
    if not zmq.has("curve"):
        raise MissingExtraError("this libzmq has no CURVE encryption", hint=pip_command("--force-reinstall pyzmq"))


def secure_server(socket: zmq.Socket[bytes], keys: NodeKeys, *, limits: SocketLimits = DEFAULT_LIMITS) -> None:
    """Encrypt a socket that will bind, and let the context's `Authenticator` decide who connects."""
    require_curve()
    _common(socket, keys, limits)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(limits.handshake_timeout_s * 1000))
    socket.setsockopt(zmq.BACKLOG, limits.max_backlog)


def secure_client(
    socket: zmq.Socket[bytes], keys: NodeKeys, server_public: str, *, limits: SocketLimits = DEFAULT_LIMITS
) -> None:
    """Encrypt a socket that will connect; only the holder of `server_public`'s secret can answer."""
    require_curve()
    _common(socket, keys, limits)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SERVERKEY, check_public_key(server_public).encode())
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(max(limits.handshake_timeout_s, 2.0) * 1000))
    socket.setsockopt(zmq.CONNECT_TIMEOUT, round(limits.connect_timeout_s * 1000))


def _common(socket: zmq.Socket[bytes], keys: NodeKeys, limits: SocketLimits) -> None:
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    socket.setsockopt(zmq.MAXMSGSIZE, limits.max_frame_bytes + _CURVE_OVERHEAD_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    if limits.heartbeat_s > 0:
        heartbeat_ms = round(limits.heartbeat_s * 1000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, heartbeat_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * heartbeat_ms)
        socket.setsockopt(zmq.HEARTBEAT_TTL, 3 * heartbeat_ms)


def sender_key(frame: zmq.Frame) -> str:
    """The public key that the sender of this frame proved, or "" for a socket without CURVE. Receive with `copy=False`."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
