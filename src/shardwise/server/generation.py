"""One HTTP request's generations: submitted together, read as one stream of events, cancelled together.

Tokens flow in from the bridge (`take`). Whoever reads them waits for each (`next`), or is called when some are there (`attach`)
and takes them without waiting (`pop`). A failure of one choice ends all. `close` frees whatever is still running; it is called on
every way out: the end, an error, a disconnected client, a cancelled task.

Where a writer is attached and nothing is on its way through the bridge, a plain token does not take that way: it is written in
the driver's thread. Then nobody else touches the generation, because the loop does so only for what is on its way. The very
first token of a stream is written so as well, with the head of the response; the loop is told that it has begun.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import Request

from shardwise.errors import ShardwiseError
from shardwise.server.access import Client
from shardwise.server.activity import Active
from shardwise.server.bridge import Arrived
from shardwise.server.engine import Event, SessionHandle
from shardwise.server.problems import Problem, from_error
from shardwise.server.state import ServerState
from shardwise.session.request import GenerationRequest, Token

T = TypeVar("T")
Write = Callable[[int, Token, float], bool]  # choice, token, when it came; False where it cannot be written at once
_WRITTEN = -1  # instead of a choice: the loop has nothing to write


class ClientGone(Exception):
    """The client closed the connection."""


class Generation:
    """Choices 0..n-1 of one request."""

    def __init__(self, state: ServerState, requests: Sequence[GenerationRequest], active: Active, client: Client) -> None:
        self._state = state
        self._requests = list(requests)
        self._active = active
        self._client = client
        self._arrived: deque[Arrived] = deque()
        self._on_tokens: Callable[[], None] | None = None
        self._write_first: Write | None = None
        self._write_now: Write | None = None
        self._came = False  # an event, by whichever way
        self._begun = False  # the first token is written
        self._on_the_way = 0  # events that the loop has not handled yet
        self._lock = threading.Lock()
        self._waiter: asyncio.Future[None] | None = None
        self._handles: list[SessionHandle] = []
        self._open = set(range(len(self._requests)))
        self._first: tuple[int, Token, float] | None = None
        self._last_at_s: dict[int, float] = {}
        self._ended = False

    @property
    def id(self) -> str:
        return self._active.id

    def start(self, write_first: Write | None = None) -> None:
        """Submit everything, or nothing: raises a `Problem` when one is refused.

        `write_first` is offered the first token, in the driver's thread, where all have been accepted by then.
        """
        engine = self._state.engine()
        self._state.activity.begin(self._active)
        try:
            for index, request in enumerate(self._requests):
                self._handles.append(engine.submit(request, self._sink(index)))
        except ShardwiseError as error:
            self.close()
            raise from_error(error) from error
        with self._lock:
            if not self._came:
                self._write_first = write_first

    async def wait_first(self) -> None:
        """Until a token went all the way: only then may the answer say 200. Raises a `Problem` where none will come."""
        while not self._begun and self.running:
            if (item := self.pop()) is not None:
                self._first = item
                return
            await self._woken()

    async def next(self) -> tuple[int, Token, float] | None:
        """The next token (choice, token, when the driver gave it out); None when all choices have ended."""
        while (item := self.pop()) is None and self.running:
            await self._woken()
        return item

    async def _woken(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def attach(self, on_tokens: Callable[[], None], write_now: Write | None = None) -> None:
        """Call `on_tokens`, in the loop, whenever something is there for `pop`: the first time now.

        `write_now` is offered each plain token before, in the driver's thread; False where it cannot be written at once.
        """
        self._on_tokens = on_tokens
        on_tokens()
        with self._lock:
            self._write_now = write_now

    @property
    def running(self) -> bool:
        """More will come, or has come and was not taken."""
        return bool(self._open) or self._first is not None

    def take(self, arrived: list[Arrived]) -> None:
        """Events from the bridge."""
        try:
            if self._ended:
                return
            self._arrived += arrived
            if self._on_tokens is not None:
                self._on_tokens()
            elif self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        finally:
            with self._lock:
                self._on_the_way -= len(arrived)

    def pop(self) -> tuple[int, Token, float] | None:
        """As `next`, without waiting: None where nothing is there at this moment. Raises a `Problem` for a failure."""
        if self._first is not None:
            item, self._first = self._first, None
            return item
        while self._arrived:
            arrived = self._arrived.popleft()
            event = arrived.event
            if arrived.choice not in self._open:
                continue
            if isinstance(event, ShardwiseError):
                raise from_error(event)
            if event.finish_reason:
                self._open.discard(arrived.choice)
            if event.finish_reason == "cancelled":  # not a token
                raise Problem(503, "the generation was cancelled by the server", code="cancelled", retry_after_s=5.0)
            self._account(arrived, event)
            return arrived.choice, event, arrived.at_s
        return None

    def close(self) -> None:
        """Cancel what still runs. Harmless when everything has ended."""
        if self._ended:
            return
        with self._lock:
            self._ended = True
        for index, handle in enumerate(self._handles):
            if index in self._open:
                handle.cancel()
        self._state.activity.end(self._active)
        self._state.traces.end(self._active.id)
        self._client.spend_tokens(self._active.prompt_tokens + self._active.generated_tokens)

    @asynccontextmanager
    async def unless_streaming(self) -> AsyncIterator[Callable[[T], T]]:
        """Frees everything at the end of the block, unless the answer was handed to `keep`: then the stream does."""
        kept = False

        def keep(answer: T) -> T:
            nonlocal kept
            kept = True
            return answer

        try:
            yield keep
        finally:
            if not kept:
                self.close()

    def _sink(self, index: int) -> Callable[[Event], None]:
        return lambda event: self._arrive(index, event)

    def _arrive(self, choice: int, event: Event) -> None:
        """In the driver's thread."""
        bridge = self._state.bridge()
        arrived = bridge.arrived(choice, event)
        with self._lock:
            first, self._write_first, self._came = self._write_first, None, True
            write = first or (None if self._on_the_way else self._write_now)
            if write is not None and self._written(write, arrived):
                if first is None and choice in self._open:
                    return
                self._begun = self._begun or first is not None
                arrived = Arrived(_WRITTEN, event, arrived.at_s)  # the loop only sees that it has begun, or ended
            self._on_the_way += 1
        bridge.post(self, arrived)

    def _written(self, write: Write, arrived: Arrived) -> bool:
        token = arrived.event
        if self._ended or isinstance(token, ShardwiseError) or token.visits or token.finish_reason == "cancelled":
            return False
        if not write(arrived.choice, token, arrived.at_s):
            return False
        self._account(arrived, token)
        if token.finish_reason:
            self._open.discard(arrived.choice)
        return True

    def _account(self, arrived: Arrived, token: Token) -> None:
        active, metrics = self._active, self._state.metrics
        previous = self._last_at_s.get(arrived.choice)
        self._last_at_s[arrived.choice] = arrived.at_s
        if active.first_token_s is None:
            active.first_token_s = arrived.at_s
            metrics.time_to_first_token.observe(arrived.at_s - active.started_s)
        elif previous is not None:
            metrics.inter_token.observe(arrived.at_s - previous)
        active.last_token_s = arrived.at_s
        active.generated_tokens += 1
        self._state.activity.count_token()
        metrics.generated_tokens.inc()
        if token.visits:
            self._state.traces.token(active.id, arrived.choice, token)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, or raise `ClientGone` as soon as the client hangs up."""
    doing = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((doing, watching), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientGone
    finally:
        doing.cancel()
        watching.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return
