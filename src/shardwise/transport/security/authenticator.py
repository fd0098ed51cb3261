"""The ZAP handler (ZeroMQ RFC 27): libzmq asks it about every connection to a secured listening socket of its context.

A request carries the peer's address and 32-byte public key; the answer is 200 with the key as `User-Id`, or 400.
**Promises** only keys that the `AllowList` permits get in; NULL and PLAIN peers never; no key is logged.
**Fails when** another handler runs in the same context (`UsageError`). If the thread ends, libzmq refuses everybody
(`secure_server` sets ZMQ_ZAP_ENFORCE_DOMAIN).
**Called by** whoever owns a ZeroMQ context with listening sockets; start it before the first bind.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from types import TracebackType

import zmq
from zmq.utils import z85

from shardwise.errors import UsageError
from shardwise.transport.security.allow_list import AllowList
from shardwise.transport.security.keys import fingerprint

log = logging.getLogger(__name__)

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class Authenticator:
    """Answers for one context, in a thread of its own, until `close`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: AllowList) -> None:
        self.allowed = allowed
        self.num_refused = 0
        self._context = context
        self._stop_address = f"inproc://shardwise-zap-stop-{id(self)}"
        self._zap = context.socket(zmq.REP)
        self._stop = context.socket(zmq.PAIR)
        try:
            self._zap.bind(_ENDPOINT)
            self._stop.bind(self._stop_address)
        except zmq.ZMQError as error:
            self._zap.close(0)
            self._stop.close(0)
            raise UsageError("this ZeroMQ context already has an authenticator", hint="make one a context") from error
        self._thread = threading.Thread(target=self._run, name="shardwise-zap", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering: from now on everybody is refused."""
        if not self._thread.is_alive():
            return
        with self._context.socket(zmq.PAIR) as bell:
            bell.connect(self._stop_address)
            bell.send(b"")
            self._thread.join()

    def __enter__(self) -> Authenticator:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._stop in ready:
                    return
                self._zap.send_multipart(self._answer_or_refuse(self._zap.recv_multipart()))
        except zmq.ContextTerminated:
            return
        finally:
            with contextlib.suppress(zmq.ZMQError):
                self._zap.unbind(_ENDPOINT)  # at once: closing alone gives the name free some time later
            self._zap.close(0)
            self._stop.close(0)

    def _answer_or_refuse(self, request: list[bytes]) -> list[bytes]:
        """A request that cannot be judged is refused: if this thread ended, nobody could connect any more."""
        try:
            return self._answer(request)
        except Exception:
            log.exception("a connection could not be judged")
            self.num_refused += 1
            return [_VERSION, request[1] if len(request) > 1 else b"", b"500", b"this key could not be judged", b"", b""]

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """version, request id, status, text, user id, metadata."""
        request_id = request[1] if len(request) > 1 else b""
        # version, request id, domain, address, routing id, mechanism, then the credentials
        if len(request) == 7 and request[0] == _VERSION and request[5] == b"CURVE" and len(request[6]) == 32:
            public = z85.encode(request[6]).decode()
            if self.allowed.permits(public):
                return [_VERSION, request_id, b"200", b"OK", public.encode(), b""]
            who = fingerprint(public)
        else:
            who = "no key"
        self.num_refused += 1
        address = request[3].decode("ascii", "replace")[:64] if len(request) > 3 else "?"
        log.warning("refused a connection from %s (%s)", address, who)
        return [_VERSION, request_id, b"400", b"this key is not allowed here", b"", b""]
