"""A generation's tokens as server-sent events, written at once: in the driver's thread, or in the loop's turn in which they come.

    driver's thread -> Generation -> write_first, write_now -> answer.piece -> line -> socket
                                  -> bridge -> on_tokens -> answer.piece -> send -> socket  (traced tokens, failures, the end)

There is no task between: waking one for each token took as long as everything else that is done here. Only where the client
does not keep up (`send` waits) a task waits for it, and what has come meanwhile follows in one piece.

**Promises:** the headers go out after the first token really arrived; every way out runs `Generation.close`: the end, a failure
or the server's end (an event with an error, never a silent end), a client that left. **Fails when:** the client is gone.
**Called by:** the routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from shardwise.server import sse
from shardwise.server.generation import Generation
from shardwise.server.line import Line
from shardwise.server.problems import Problem, cut_short
from shardwise.server.state import ServerState
from shardwise.session.request import Token

log = logging.getLogger("shardwise.server")


class StreamedAnswer(Protocol):
    """What the events of one endpoint look like; b"" where there is nothing to say."""

    def opening(self) -> bytes: ...
    def piece(self, choice: int, token: Token) -> bytes: ...
    def ending(self) -> bytes: ...
    def failed(self, problem: Problem) -> bytes: ...


class GenerationStream(Response):
    """The response of a streamed request."""

    media_type = "text/event-stream"

    def __init__(self, state: ServerState, generation: Generation, answer: StreamedAnswer, scope: Scope) -> None:
        super().__init__(headers=sse.HEADERS)
        del self.headers["content-length"]
        self._clock, self._overhead = state.clock, state.metrics.overhead
        self._keepalive_s = state.settings.keepalive_s
        self._generation, self._answer = generation, answer
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._line: Line | None = scope.get("shardwise.line")
        self._mark: Callable[[Message], None] | None = scope.get("shardwise.mark")
        self._opened = False
        self._backlog: list[Message] = []  # behind a send that waits
        self._late: deque[tuple[bytes, float]] = deque()  # from the driver's thread, for the loop to write
        self._blocked = False
        self._wrote = False
        self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        try:
            await send(self._start())
            if not self._opened:
                self._write(self._answer.opening())
            self._generation.attach(self.on_tokens, self.write_now)
            self._spawn(self._watch(receive))
            self._spawn(self._keep_alive())
            await self._done
        except asyncio.CancelledError:  # the server ends, and the drain was too short for this one
            self._cut_short()
        finally:
            self._generation.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self) -> Message:
        return {"type": "http.response.start", "status": 200, "headers": list(self.raw_headers)}

    def _cut_short(self) -> None:
        self._generation.close()  # from here on no other thread writes
        self._write_late()
        self._write(self._answer.failed(cut_short()), more=False)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(self._loop.create_task(work))

    def on_tokens(self) -> None:
        """Write whatever has come. Called in the loop."""
        whole = False
        try:
            self._write_late()
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

    def write_first(self, choice: int, token: Token, at_s: float) -> bool:
        """The head and the first token, in the driver's thread, before the loop calls this response."""
        if self._line is None or self._mark is None or not self._line.is_fresh:
            return False
        piece = self._piece(choice, token, first=True)
        if piece is None:
            return True
        self._opened = self._wrote = True
        start = self._start()
        self._mark(start)
        if self._line.begin(start["headers"], piece):
            self._overhead.observe(self._line.passed_s - at_s)
        else:
            self._late.append((piece, at_s))  # follows the head
        return True

    def write_now(self, choice: int, token: Token, at_s: float) -> bool:
        """Write a token in the driver's thread; False where it has to go through the loop."""
        if self._line is None or self._blocked or self._ended or self._late or not self._line.is_free:
            return False
        piece = self._piece(choice, token)
        if not piece:
            return True
        self._wrote = True
        if self._line.write_now(piece):
            self._overhead.observe(self._line.passed_s - at_s)
        else:  # it did not go out just now after all: the answer has counted it, so it must be the next
            self._late.append((piece, at_s))
            self._soon(self._write_late)
        return True

    def _piece(self, choice: int, token: Token, *, first: bool = False) -> bytes | None:
        """Its bytes; None where they cannot be made: then the connection ends, and the driver goes on with the others."""
        try:
            opening = self._answer.opening() if first else b""
            return opening + self._answer.piece(choice, token)
        except Exception:
            log.exception("a stream broke")
            self._soon(self._finish)
            return None

    def _soon(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the connection with it
            self._loop.call_soon_threadsafe(work)

    def _write_late(self) -> None:
        while self._late:
            piece, at_s = self._late[0]
            if self._write(piece):
                self._overhead.observe(self._clock.now_s() - at_s)
            self._late.popleft()  # only now: until it is written nothing may be written past it

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
