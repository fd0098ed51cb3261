"""Generations whose tokens a test says, an answer that shows their texts as they are, and an engine that counts aloud."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from shardwise.clock import SystemClock
from shardwise.server.engine import Event
from shardwise.server.problems import Problem
from shardwise.server.token_stream import GenerationStream, StreamedAnswer
from shardwise.session.request import GenerationRequest, Readiness, Token
from shardwise.transport.messages import Stats


class Words:
    """A `StreamedAnswer`."""

    def opening(self) -> bytes:
        return b"<"

    def piece(self, choice: int, token: Token) -> bytes:
        return token.text.encode()

    def ending(self) -> bytes:
        return b">"

    def failed(self, problem: Problem) -> bytes:
        return f"!{problem.message}".encode()


class ScriptedGeneration:
    """What a `GenerationStream` needs of a `Generation`."""

    def __init__(self) -> None:
        self._there: list[tuple[int, Token, float] | Problem] = []
        self._on_tokens: Any = None
        self.running, self.closed = True, False

    def stream(self, answer: StreamedAnswer) -> GenerationStream:
        overhead = SimpleNamespace(observe=lambda seconds: None)
        state = SimpleNamespace(
            clock=SystemClock(), metrics=SimpleNamespace(overhead=overhead), settings=SimpleNamespace(keepalive_s=10.0)
        )
        return GenerationStream(state, self, answer, {"type": "http"})  # type: ignore[arg-type]

    def attach(self, on_tokens: Any, write_now: Any = None) -> None:
        self._on_tokens = on_tokens
        on_tokens()

    def pop(self) -> tuple[int, Token, float] | None:
        if not self._there:
            return None
        item = self._there.pop(0)
        if isinstance(item, Problem):
            raise item
        self.running = not item[1].finish_reason
        return item

    def say(self, text: str, *, last: bool = False) -> None:
        self._there.append((0, Token(id=1, text=text, position=1, finish_reason="stop" if last else ""), 0.0))
        self._on_tokens()

    def close(self) -> None:
        self.closed = True


class CountingEngine:
    """An engine without stages: each session says the numbers from 0 on, as fast as it can; `filler` makes tokens long."""

    def __init__(self, deployment: Any, *, filler: str = "") -> None:
        self.model, self.tokenizer, self.options = deployment.model, deployment.tokenizer, deployment.options
        self.stages: Sequence[Any] = ()
        self.recoveries: Sequence[Any] = ()
        self._filler = filler

    def submit(self, request: GenerationRequest, on_event: Callable[[Event], None]) -> Any:
        stopped = threading.Event()

        def say() -> None:
            for number in range(request.max_tokens):
                last = "length" if number == request.max_tokens - 1 else ""
                on_event(Token(id=1, text=f"{number} {self._filler}", position=number, finish_reason=last))
                if stopped.is_set():
                    return

        threading.Thread(target=say, daemon=True).start()
        return SimpleNamespace(cancel=stopped.set)

    def readiness(self) -> Readiness:
        return Readiness(ready=True, last_token_age_s=0.0)

    def stats(self) -> Sequence[Stats]:
        return ()

    def close(self, drain_s: float = 0.0) -> None:
        """Nothing to end."""
