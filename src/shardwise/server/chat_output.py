"""Generated tokens -> the choices of a chat answer, whole or as stream chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shardwise.server.engine import Tokenizer
from shardwise.server.logprobs import chat_entry
from shardwise.server.toolcalls import Piece, ToolCall, ToolCallReader
from shardwise.session.request import Token


@dataclass(slots=True)
class ChatChoice:
    """One choice as it grows. `marks` are single tokens that stand for a mark of the tool notation and have no text."""

    index: int
    tokenizer: Tokenizer
    reader: ToolCallReader | None = None
    marks: dict[int, str] = field(default_factory=dict)
    num_top: int = -1  # -1 = no logprobs
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = ""

    def feed(self, token: Token) -> list[Piece]:
        """What became known with this token; remembers it."""
        text = token.text or self.marks.get(token.id, "")
        pieces: list[Piece]
        if self.reader is None:
            pieces = [text] if text else []
        else:
            pieces = self.reader.feed(text) if text else []
            if token.finish_reason:
                pieces += self.reader.close()
        if self.num_top >= 0 and not (token.finish_reason == "stop" and not token.text and token.id in self.tokenizer.eog_ids):
            self.logprobs.append(chat_entry(self.tokenizer, token, self.num_top))
        for piece in pieces:
            if isinstance(piece, ToolCall):
                self.calls.append(piece)
            else:
                self.texts.append(piece)
        if token.finish_reason:
            self.finish_reason = "tool_calls" if self.calls else token.finish_reason
        return pieces

    def message(self) -> dict[str, Any]:
        """The whole choice of an answer that is not streamed."""
        text = "".join(self.texts)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not self.calls else None, "refusal": None}
        if self.calls:
            message["tool_calls"] = [call.as_dict() for call in self.calls]
        return {
            "index": self.index,
            "message": message,
            "logprobs": {"content": self.logprobs, "refusal": None} if self.num_top >= 0 else None,
            "finish_reason": self.finish_reason,
        }

    def deltas(self, token: Token) -> Iterator[dict[str, Any]]:
        """The `choices` entries of the chunks that this token makes; the last one carries the finish reason."""
        first_call = len(self.calls)
        seen = len(self.logprobs)
        pieces = self.feed(token)
        for piece in pieces:
            if isinstance(piece, ToolCall):
                delta: dict[str, Any] = {"tool_calls": [{"index": first_call, **piece.as_dict()}]}
                first_call += 1
            else:
                delta = {"content": piece}
            yield self._chunk(delta, None, seen)
            seen = len(self.logprobs)
        if seen < len(self.logprobs):  # a token without text of its own still has a log probability
            yield self._chunk({"content": ""}, None, seen)
        if self.finish_reason:
            yield self._chunk({}, self.finish_reason, len(self.logprobs))

    def opening(self) -> dict[str, Any]:
        """The chunk that names the role."""
        return self._chunk({"role": "assistant", "content": ""}, None, 0)

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None, seen: int) -> dict[str, Any]:
        entries = self.logprobs[seen:]
        return {
            "index": self.index,
            "delta": delta,
            "logprobs": {"content": entries, "refusal": None} if entries else None,
            "finish_reason": finish_reason,
        }
