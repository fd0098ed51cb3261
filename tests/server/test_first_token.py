"""The first token of a stream leaves with the response's head, from the driver's thread; nothing else of the answer changes."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from shardwise.deploy.deployment import Deployment
from shardwise.errors import QueueFull, SessionLost
from shardwise.server.engine import Event
from shardwise.server.generation import Generation
from shardwise.server.line import Line, SharedTransport
from shardwise.session.request import GenerationRequest, Token

from .running import running_server, wait_until
from .scripted import CountingEngine
from .test_order import Recording

BODY = {"model": "sample", "prompt": "hi", "max_tokens": 5, "stream": True}


class Told(CountingEngine):
    """Says of each session what the test wants, when it is told to."""

    def __init__(self, deployment: Deployment, script: Callable[[int, Callable[[Event], None]], None]) -> None:
        super().__init__(deployment)
        self._script, self.sessions, self.cancelled = script, 0, 0

    def submit(self, request: GenerationRequest, on_event: Callable[[Event], None]) -> Any:
        self.sessions += 1
        self._script(self.sessions, on_event)
        return SimpleNamespace(cancel=self._cancel)

    def _cancel(self) -> None:
        self.cancelled += 1


def say(*texts: str) -> list[Token]:
    return [
        Token(id=1, text=text, position=position, finish_reason="length" if position == len(texts) - 1 else "")
        for position, text in enumerate(texts)
    ]


def later(*events: Event, after: threading.Event | None = None) -> Callable[[int, Callable[[Event], None]], None]:
    """From another thread, once the request waits for its first token."""

    def script(_: int, on_event: Callable[[Event], None]) -> None:
        def run() -> None:
            if after is not None:
                after.wait(10)
            for event in events:
                on_event(event)

        threading.Timer(0.05, run).start()

    return script


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each answer's head left from the driver's thread."""
    out: list[bool] = []
    original = Line.begin

    def begin(self: Line, *args: Any) -> bool:
        out.append(original(self, *args))
        return out[-1]

    monkeypatch.setattr(Line, "begin", begin)
    return out


def texts(answer: httpx.Response) -> list[str]:
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event)["choices"][0]["text"] for event in events]


@pytest.mark.parametrize("words", [["one"], ["one", "two"], ["", "two", "three"], ["a" * 3_000_000, "b", "c"]])
def test_the_answer_is_the_same_whichever_thread_begins_it(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, begun: list[bool], words: list[str]
) -> None:
    """Head and body, also where the first token is all, where it says nothing, and where the socket does not take it at once."""
    with running_server(Told(deployment, later(*say(*words)))) as server:
        from_driver = server.http.post("/v1/completions", json=BODY, headers={"X-Request-Id": "same"})
        assert begun == [True]
        start = Generation.start
        monkeypatch.setattr(Generation, "start", lambda self, write_first=None: start(self))
        from_loop = server.http.post("/v1/completions", json=BODY, headers={"X-Request-Id": "same"})
        assert begun == [True]
        for answer in (from_driver, from_loop):
            assert answer.status_code == 200
            assert "".join(texts(answer)) == "".join(words)
            del answer.headers["date"]
        assert from_driver.headers.raw == from_loop.headers.raw
        assert server.state.activity.total_generated_tokens == 2 * len(words)
        wait_until(lambda: not server.state.activity.active, 10, "all requests to be forgotten")


def test_an_error_in_place_of_the_first_token_has_its_status(deployment: Deployment, begun: list[bool]) -> None:
    with running_server(Told(deployment, later(SessionLost("no stage is left")))) as server:
        answer = server.http.post("/v1/completions", json=BODY)
    assert answer.status_code == 503
    assert "no stage is left" in answer.json()["error"]["message"]
    assert not begun


def test_nothing_begins_before_every_choice_is_accepted(deployment: Deployment, begun: list[bool]) -> None:
    def script(session: int, on_event: Callable[[Event], None]) -> None:
        if session == 2:
            raise QueueFull("enough waits already")
        on_event(say("one", "two")[0])

    engine = Told(deployment, script)
    with running_server(engine) as server:
        answer = server.http.post("/v1/completions", json=BODY | {"n": 2})
    assert answer.status_code == 429
    assert not begun
    assert engine.cancelled == 1


def test_tokens_that_overtake_the_loop_stay_in_order(deployment: Deployment, begun: list[bool]) -> None:
    """All at once, so that most come between the first one and the loop's turn."""
    words = [f"{number} " for number in range(300)]
    with running_server(Told(deployment, later(*say(*words)))) as server:
        for _ in range(10):
            assert texts(server.http.post("/v1/completions", json=BODY)) == words
    assert begun == [True] * 10


def test_two_requests_of_the_same_name_are_two(deployment: Deployment) -> None:
    """A client may name its requests; each is still seen, answered and forgotten as one of its own."""
    may_speak = threading.Event()
    with running_server(Told(deployment, later(*say("one", "two"), after=may_speak))) as server:
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(httpx.post(f"{server.url}/v1/completions", json=BODY, headers={"X-Request-Id": "same"}, timeout=30))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(server.state.activity.active) == 3, 10, "three requests")
        may_speak.set()
        for thread in threads:
            thread.join(20)
        assert [texts(answer) for answer in answers] == [["one", "two"]] * 3
        assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
        assert len({json.loads(answer.text.split("\n")[0][6:])["id"] for answer in answers}) == 3
        wait_until(lambda: not server.state.activity.active, 10, "all requests to be forgotten")


def test_a_response_that_turns_into_another_one_breaks_the_connection() -> None:
    async def check() -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        transport = Recording(near)
        shared = SharedTransport(transport, asyncio.get_running_loop())  # type: ignore[arg-type]
        cycle = SimpleNamespace(response_started=False, disconnected=False, default_headers=[(b"a", b"b")], keep_alive=True)
        line = Line(shared, cycle, SimpleNamespace(write_paused=False))
        assert line.is_fresh
        assert line.begin([(b"C", b"d")], b"first")
        assert far.recv(4096) == b"HTTP/1.1 200 OK\r\na: b\r\nc: d\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n"
        shared.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
        assert transport.aborted
        assert transport.written == b""
        assert not line.begin([], b"again")
        for one in (near, far):
            one.close()

    asyncio.run(check())
