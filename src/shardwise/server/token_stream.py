"""A generation's tokens as server-sent events, written in the same turn of the loop in which they arrive.

    bridge -> Generation.take -> GenerationStream.on_tokens -> answer.piece -> send -> socket

There is no task between: waking one for each token took as long as everything else that is done here. Only where the client
does not keep up (`send` waits) a task waits for it, and what has come meanwhile follows in one piece.

**Promises:** the headers go out after the first token really arrived; every way out runs `Generation.close`: the end, a failure
(an event with an error, never a silent end), a client that left. **Fails when:** the client is gone. **Called by:** the routes.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from shardwise.server import sse
from shardwise.server.generation import Generation
from shardwise.server.problems import Problem
from shardwise.server.state import ServerState
from shardwise.session.request import Token


class StreamedAnswer(Protocol):
    """What the events of one endpoint look like; b"" where there is nothing to say."""

    def opening(self) -> bytes: ...
    def piece(self, choice: int, token: Token) -> bytes: ...
    def ending(self) -> bytes: ...
    def failed(self, problem: Problem) -> bytes: ...


class GenerationStream(Response):
    """The response of a streamed request."""

    media_type = "text/event-stream"

    def __init__(self, state: ServerState, generation: Generation, answer: StreamedAnswer) -> None:
        super().__init__(headers=sse.HEADERS)
        del self.headers["content-length"]
        self._clock, self._overhead = state.clock, state.metrics.overhead
        self._keepalive_s = state.settings.keepalive_s
        self._generation, self._answer = generation, answer
        self._backlog: list[Message] = []  # behind a send that waits
        self._blocked = False
        self._wrote = False
        self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._send = send
        self._done: asyncio.Future[None] = loop.create_future()
        tasks: set[asyncio.Task[None]] = set()
        self._spawn = lambda work: tasks.add(loop.create_task(work))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._write(self._answer.opening())
            self._generation.attach(self.on_tokens)
            self._spawn(self._watch(receive))
            self._spawn(self._keep_alive())
            await self._done
        finally:
            self._generation.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def on_tokens(self) -> None:
        """Write whatever has come. Called in the loop."""
        whole = False
        try:
            pieces: list[bytes] = []
            times_s: list[float] = []
            last = self._gather(pieces, times_s)
            kept_up = self._write(b"".join(pieces), more=not last)
            if kept_up:
                now_s = self._clock.now_s()
                for at_s in times_s:
                    self._overhead.observe(now_s - at_s)
            whole = True
        finally:
            if not whole:  # a defect: the connection ends, so that the client does not wait for ever
                self._finish()

    def _gather(self, pieces: list[bytes], times_s: list[float]) -> bool:
        """The events of all tokens that are there; True where nothing will follow."""
        try:
            while (item := self._generation.pop()) is not None:
                choice, token, at_s = item
                piece = self._answer.piece(choice, token)
                if piece:
                    pieces.append(piece)
                    times_s.append(at_s)
        except Problem as problem:
            pieces.append(self._answer.failed(problem))
            return True
        if self._generation.running:
            return False
        pieces.append(self._answer.ending())
        return True

    def _write(self, body: bytes, *, more: bool = True) -> bool:
        """Hand bytes to the connection; False where it does not take any at the moment."""
        if self._ended or (more and not body):
            return True
        self._ended = not more
        self._wrote = True
        message: Message = {"type": "http.response.body", "body": body, "more_body": more}
        if self._blocked:
            self._backlog.append(message)
            return False
        sending: Coroutine[Any, Any, None] = self._send(message)  # type: ignore[assignment]
        try:
            awaited = sending.send(None)
        except StopIteration:
            if not more:
                self._finish()
            return True
        self._blocked = True
        self._spawn(self._catch_up(sending, awaited))
        return False

    async def _catch_up(self, sending: Coroutine[Any, Any, None], awaited: Any) -> None:
        """Wait for the client, then send what has come meanwhile, together."""
        try:
            await _rest(sending, awaited)
            while self._backlog:
                waiting, self._backlog = self._backlog, []
                body = b"".join(message["body"] for message in waiting)
                await self._send({"type": "http.response.body", "body": body, "more_body": waiting[-1]["more_body"]})
            self._blocked = False
        finally:
            if self._blocked or self._ended:
                self._finish()

    def _finish(self) -> None:
        self._ended = True
        if not self._done.done():
            self._done.set_result(None)

    async def _keep_alive(self) -> None:
        while True:
            self._wrote = False
            await asyncio.sleep(self._keepalive_s)
            if not self._wrote and not self._blocked:
                self._write(sse.KEEP_ALIVE)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._finish()


@types.coroutine
def _rest(sending: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """The rest of a coroutine whose first step was made outside of a task, and which waits for `awaited`."""
    try:
        while True:
            try:
                value = yield awaited
            except BaseException as error:  # noqa: BLE001  a cancellation belongs to the coroutine
                awaited = sending.throw(error)
            else:
                awaited = sending.send(value)
    except StopIteration:
        return
