"""Server-sent events over ASGI: one task writes, one watches for the client's disconnect, one keeps a waiting stream open.

For what comes now and then, as the live view's pictures; tokens go through `token_stream`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

KEEP_ALIVE = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_encode = msgspec.json.Encoder().encode


def data(value: object) -> bytes:
    """An event without a name."""
    return b"data: " + _encode(value) + b"\n\n"


def named(event: str, value: object) -> bytes:
    """An event with a name."""
    return b"event: " + event.encode() + b"\ndata: " + _encode(value) + b"\n\n"


class EventStream(Response):
    """Writes the pieces of an iterator as they come."""

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncIterator[bytes], *, keepalive_s: float) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._pieces = pieces
        self._keepalive_s = keepalive_s
        self._wrote = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks: list[asyncio.Task[None]] = []
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            writing = asyncio.create_task(self._write(send))
            tasks = [writing, asyncio.create_task(_watch(receive)), asyncio.create_task(self._keep_alive(send))]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if writing in done:
                writing.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        async for piece in self._pieces:
            self._wrote = True
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            self._wrote = False
            await asyncio.sleep(self._keepalive_s)
            if not self._wrote:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})


async def _watch(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
