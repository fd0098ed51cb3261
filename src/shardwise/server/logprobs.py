"""Log probabilities in OpenAI's two shapes (chat: one object a token; completions: parallel lists)."""

from __future__ import annotations

import math
from typing import Any

from shardwise.server.engine import Tokenizer
from shardwise.session.request import Token

_LOWEST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot hold


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else _LOWEST


def _entry(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


def chat_entry(tokenizer: Tokenizer, token: Token, num_top: int) -> dict[str, Any]:
    """One element of `logprobs.content`."""
    top = [_entry(tokenizer, one.token, one.logprob) for one in token.top[:num_top]]
    return _entry(tokenizer, token.id, token.logprob) | {"top_logprobs": top}


class CompletionLogprobs:
    """The parallel lists of `/v1/completions`, filled token by token."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = 0

    def add(self, tokens: list[Token]) -> dict[str, Any]:
        """The lists for these tokens; offsets go on from earlier calls."""
        out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            text = self._text(token.id)
            out["tokens"].append(text)
            out["token_logprobs"].append(_finite(token.logprob))
            top = {self._text(one.token): _finite(one.logprob) for one in token.top[: self._num_top]}
            out["top_logprobs"].append(top or None)
            out["text_offset"].append(self._offset)
            self._offset += len(text)
        return out

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode(errors="replace")
