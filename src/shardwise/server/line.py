"""A connection that two threads may write to: the event loop as always, and whoever has a token in hand.

    driver's thread --- begin, write_now ---> socket          (nothing waits in front of it)
    event loop -------- write -------> transport -> socket

Waking the loop for each token cost more than the token's own bytes, and where all cores compute the loop waited milliseconds
for its turn. So a piece of a stream is written where it arises, if nothing else waits to be written; otherwise the caller goes
through the loop as ever. The head of a response, too, may be written with its first piece (`begin`): what the loop then writes
as the head is left out.

**Promises:** bytes of one write are never torn apart by another; what `write_now` has taken leaves before anything written later;
after `close`, `abort` or the loss of the connection nothing is written to its descriptor; where the loop answers something else
than has begun, the connection breaks. **Fails when:** never; False means "not now".
**Called by** `protocol`, `token_stream`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from shardwise.clock import SystemClock

_OK = STATUS_LINE[200]
_CLOCK = SystemClock()


class SharedTransport:
    """Around asyncio's transport. All methods but `write_now` belong to the loop's thread."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._lock = threading.Lock()
        self._rest = b""  # what the socket did not take of a `write_now`
        self._head_is_out = False  # by `write_now`; the loop's own is still to come
        self._waits = False  # the transport has bytes that the socket did not take
        self.passed_s = 0.0  # when the latest `write_now` went to the kernel
        plain = sys.platform != "win32" and transport.get_extra_info("ssl_object") is None
        socket = transport.get_extra_info("socket") if plain else None
        self._descriptor = socket.fileno() if socket is not None else -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """In the loop: after everything that was written before."""
        with self._lock:
            begun = self._head_is_out and bool(data)
            other = begun and not data.startswith(_OK)
            if begun:
                self._head_is_out, data = False, b""
            rest, self._rest = self._rest, b""
            if rest or data:
                self._transport.write(rest + data)
            self._waits = self._transport.get_write_buffer_size() > 0
        if other:
            self.abort()

    @property
    def is_plain(self) -> bool:
        """Whether the bytes go to a socket as they are."""
        return self._descriptor >= 0

    def write_between(self, data: bytes) -> None:
        """In the loop, between two responses; left out where the next one has begun, or something waits to be written."""
        with self._lock:
            if self._head_is_out or not self.is_free or self._transport.is_closing():
                return
            self._transport.write(data)
            self._waits = self._transport.get_write_buffer_size() > 0

    @property
    def is_free(self) -> bool:
        """From any thread: nothing waits to be written, as far as can be said without asking."""
        return self._descriptor >= 0 and not self._waits and not self._rest

    def write_now(self, data: bytes, *, begins: Any = None) -> bool:
        """From any thread: True where the socket takes it now, or has begun to. `begins`: the response whose head is in it."""
        with self._lock:
            if not self.is_free or (begins is not None and begins.response_started):
                return False
            started_s = _CLOCK.now_s()  # the client may run before this thread does again, which delays nobody
            try:
                taken = os.write(self._descriptor, data)
            except OSError:  # full, or broken: the loop finds out which
                return False
            self.passed_s = started_s
            self._head_is_out = self._head_is_out or begins is not None
            if taken < len(data):
                self._rest = data[taken:]
                with contextlib.suppress(RuntimeError):  # the loop has ended, and the connection with it
                    self._loop.call_soon_threadsafe(self.write, b"")
            return True

    def forget_descriptor(self) -> None:
        """The connection ends: its descriptor will soon be somebody else's."""
        with self._lock:
            self._descriptor = -1

    def close(self) -> None:
        self.forget_descriptor()
        if not self._transport.is_closing():
            self.write(b"")
        self._transport.close()

    def abort(self) -> None:
        self.forget_descriptor()
        self._transport.abort()


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


class Line:
    """The rest of one chunked response: its further pieces may come from any thread."""

    def __init__(self, transport: SharedTransport, cycle: Any, flow: Any) -> None:
        self._transport, self._cycle, self._flow = transport, cycle, flow
        self.num_bytes = 0

    @property
    def passed_s(self) -> float:
        """When the latest bytes that were written at once went to the kernel, by `SystemClock`."""
        return self._transport.passed_s

    @property
    def is_fresh(self) -> bool:
        """Whether nothing of the response is out, and nothing waits in front of it."""
        cycle = self._cycle
        return not cycle.response_started and not cycle.disconnected and not self._flow.write_paused and self._transport.is_free

    @property
    def is_free(self) -> bool:
        """Whether the response's head is out and nothing waits in front of a further piece."""
        cycle = self._cycle
        ready = cycle.chunked_encoding and not cycle.response_complete and not cycle.disconnected
        return bool(ready) and not self._flow.write_paused and self._transport.is_free

    def begin(self, headers: list[tuple[bytes, bytes]], piece: bytes) -> bool:
        """The head as the loop would write it, and a first chunk; False where it could not be written at once."""
        cycle = self._cycle
        lines = [b"%b: %b\r\n" % (name.lower(), value) for name, value in [*cycle.default_headers, *headers]]
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        head = b"%btransfer-encoding: chunked\r\n\r\n" % b"".join([_OK, *lines])
        if not self._transport.write_now(head + (_chunk(piece) if piece else b""), begins=cycle):
            return False
        self.num_bytes += len(piece)
        return True

    def write_now(self, piece: bytes) -> bool:
        """A chunk; False where it could not be written at once."""
        if not self.is_free or not self._transport.write_now(_chunk(piece)):
            return False
        self.num_bytes += len(piece)
        return True
