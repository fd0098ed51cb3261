"""Uvicorn's HTTP protocol with limits on what comes before a request and on who does not read its answer.

    connection -> (head of a request: bounded in time and size) -> application -> (bytes that nobody takes: bounded in time)

**Promises:** a connection that has no whole request head `HEAD_TIMEOUT_S` after its beginning, or after the head's first byte,
is closed; a head of more than `MAX_HEAD_BYTES` gets 431; a client that takes nothing of its answer for `STALL_TIMEOUT_S` is
cut off, and its generation with it; who hangs up ends the request that runs, and those that wait behind it never begin; at
most `MAX_WAITING` wait (one more ends the connection); there are at most `MAX_CONNECTIONS`. **Called by** uvicorn (`run`).

A client that ends its sending half may only have said all (`nc -N`, old proxies) or may be gone: on the wire both are the same.
Its requests are answered. Whether somebody is left is seen by writing: until the answer begins, an interim answer (100, which
every HTTP/1.1 client passes over) is written from time to time, and a system without such a client refuses it. HTTP/1.0 has no
interim answers: it has `GRACE_S`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from shardwise.server.line import Line, SharedTransport

HEAD_TIMEOUT_S = 10.0
STALL_TIMEOUT_S = 60.0
MAX_HEAD_BYTES = 64 * 1024
MAX_CONNECTIONS = 4000
MAX_WAITING = 16  # requests behind the one that runs, on one connection
GRACE_S = 2.0
FIRST_ASKED_S, MOST_ASKED_S = 0.05, 1.0  # before, and between, interim answers
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._asking_timer: asyncio.TimerHandle | None = None  # from the end of the client's sending half on
        self._unanswered: list[RequestResponseCycle] = []  # uvicorn's `cycle` is the newest, which may only wait

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(SharedTransport(transport, self.loop))  # type: ignore[arg-type]
        if len(self.connections) > MAX_CONNECTIONS:
            self.transport.abort()
            return
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.forget_descriptor()
        for timer in (self._head_timer, self._stall_timer, self._asking_timer):
            if timer is not None:
                timer.cancel()
        self.pipeline.clear()
        for cycle in self._unanswered:
            cycle.disconnected = cycle.disconnected or not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Stay half open while something whole is to be answered, and end with that."""
        if self._asking_timer is not None:
            return True
        newest = self.cycle
        if newest is None or newest.response_complete or newest.more_body or not self._shared.is_plain:
            return None
        newest.keep_alive = False
        if any(one.scope["http_version"] != "1.1" for one in self._unanswered):
            self._asking_timer = self.loop.call_later(GRACE_S, self.transport.abort)
        else:
            self._asking_timer = self.loop.call_later(FIRST_ASKED_S, self._ask_who_is_there, FIRST_ASKED_S)
        return True

    def _ask_who_is_there(self, again_s: float) -> None:
        running = next((one for one in self._unanswered if not one.response_complete), None)
        if running is not None and not running.response_started:
            self._shared.write_between(_CONTINUE)
        self._asking_timer = self.loop.call_later(again_s, self._ask_who_is_there, min(2 * again_s, MOST_ASKED_S))

    @property
    def _shared(self) -> SharedTransport:
        return self.transport  # type: ignore[return-value]

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if len(self.pipeline) >= MAX_WAITING:
            self.transport.abort()
            raise ConnectionAbortedError("too many requests at once")  # ends the parsing of what came with it
        super().on_headers_complete()
        if self.cycle is not None:
            self._unanswered = [one for one in self._unanswered if not one.response_complete] + [self.cycle]
            self.flow.resume_reading()  # uvicorn does not read while one waits: a hang-up would not be seen
            self.scope["shardwise.line"] = Line(self._shared, self.cycle, self.flow)  # type: ignore[typeddict-unknown-key]

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def pause_writing(self) -> None:
        self._stall_timer = self.loop.call_later(STALL_TIMEOUT_S, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        super().resume_writing()
