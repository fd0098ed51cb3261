"""Whether a connecting socket got in, told within a deadline instead of ZeroMQ's silent retries.

libzmq's monitor events flow in, one verdict flows out. **Promises** `wait` returns once the handshake is done, or raises
`AuthenticationFailed` (this node's key is not allowed there, or the peer's key is not the expected one), `ConnectFailed`
(nobody listens) or `ConnectTimeout`. **Called by** the channel: make it before `connect`, `close` it afterwards.
"""

from __future__ import annotations

import struct
from types import TracebackType

import zmq

from shardwise.clock import Clock, SystemClock
from shardwise.errors import AuthenticationFailed, ConnectFailed, ConnectTimeout, NetworkError

_HANDSHAKES = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
# A peer that cannot open our greeting hangs up without a word and at once, again and again; one that is restarting or overloaded
# (its handshake timeout is 0.9 s) does so less quickly. Only hang-ups in quick succession are a verdict.
_HANGUPS_BEFORE_VERDICT = 5
_QUICK_S = 0.5
_EVENT = struct.Struct("=HI")
_HINT_KEY = "join again with a new invite, or check which key the peer has now"


class HandshakeWatch:
    """Watches one socket from its creation until `close`."""

    def __init__(self, socket: zmq.Socket[bytes], *, clock: Clock | None = None) -> None:
        self._socket = socket
        self._clock = clock or SystemClock()
        self._monitor = socket.get_monitor_socket(_HANDSHAKES | _FAILURES | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED)
        self._num_hangups = 0
        self._hung_up_s = self._clock.now_s()
        self._num_unreachable = 0

    def wait(self, timeout_s: float, *, peer: str = "") -> None:
        """Block until the peer let this node in; raises the reason if it did not."""
        deadline_s = self._clock.now_s() + timeout_s
        while True:
            left_ms = round((deadline_s - self._clock.now_s()) * 1000)
            if left_ms <= 0 or not self._monitor.poll(left_ms):
                raise self._late(timeout_s, peer)
            if self._judge(self._next_event(), peer):
                return

    def check(self, *, peer: str = "") -> None:
        """Raise `AuthenticationFailed` if the peer has turned this node away by now; never blocks."""
        while self._monitor.poll(0):
            self._judge(self._next_event(), peer)

    def _next_event(self) -> int:
        """The event's number (16 bits, then its value; the second frame is the address: `zmq_socket_monitor`).

        By hand, because `zmq.utils.monitor` loads asyncio, which costs every worker's start 10 ms.
        """
        return int(_EVENT.unpack(self._monitor.recv_multipart()[0])[0])

    def close(self) -> None:
        """Stop watching; the socket itself stays open."""
        self._socket.disable_monitor()
        self._monitor.close(0)

    def _judge(self, event: int, peer: str) -> bool:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return True
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise AuthenticationFailed("the peer does not allow this node's key", where=peer, hint=_HINT_KEY)
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            raise AuthenticationFailed("the peer does not speak encrypted shardwise", where=peer, hint="check address and port")
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            now_s = self._clock.now_s()
            self._num_hangups = self._num_hangups + 1 if now_s - self._hung_up_s < _QUICK_S else 1
            self._hung_up_s = now_s
            if self._num_hangups >= _HANGUPS_BEFORE_VERDICT:
                raise AuthenticationFailed("the peer hung up during the key exchange: its key is not the expected one",
                                           where=peer, hint=_HINT_KEY)  # fmt: skip
        else:
            self._num_unreachable += 1
        return False

    def _late(self, timeout_s: float, peer: str) -> NetworkError:
        if self._num_hangups:
            return AuthenticationFailed("the peer hung up during the key exchange", where=peer, hint=_HINT_KEY)
        if self._num_unreachable:
            return ConnectFailed("nobody listens there", where=peer, hint="is the worker running, and is a firewall in between?")
        return ConnectTimeout(f"no connection within {timeout_s:g} s", where=peer, hint="check the address and the network")

    def __enter__(self) -> HandshakeWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
