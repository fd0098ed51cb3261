"""A generation whose tokens a test says, and an answer that shows their texts as they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shardwise.clock import SystemClock
from shardwise.server.problems import Problem
from shardwise.server.token_stream import GenerationStream, StreamedAnswer
from shardwise.session.request import Token


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
        return GenerationStream(state, self, answer)  # type: ignore[arg-type]

    def attach(self, on_tokens: Any) -> None:
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
