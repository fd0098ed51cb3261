"""The tokenizer of a GGUF model: llama.cpp's own, loaded without weights, with the model's chat template.

It is loaded by `load`, or when it is first asked; `StageLoadFailed` where llama.cpp cannot.
Any thread may ask it. The vocabulary is freed with the last reference, never before: a request may be at it while its deployment
is being closed.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

from shardwise.errors import UsageError
from shardwise.session.chat_template import render_chat
from shardwise.stage.llama import library
from shardwise.stage.llama.vocabulary import Vocabulary

MAX_TEXT = 64 * 2**20


class LlamaTokenizer:
    """`session.text.Tokenizer` over llama.cpp's vocabulary."""

    def __init__(self, path: str, chat_template: str | None) -> None:
        self._path, self._template = path, chat_template
        self._lock = threading.Lock()
        self._loaded: tuple[Any, Vocabulary] | None = None

    def load(self) -> tuple[Any, Vocabulary]:
        """llama.cpp's functions and the vocabulary."""
        with self._lock:
            if self._loaded is None:
                self._loaded = library.load(), Vocabulary(self._path)
            return self._loaded

    @property
    def _api(self) -> Any:
        return (self._loaded or self.load())[0]

    @property
    def _vocab(self) -> Any:
        return (self._loaded or self.load())[1].handle

    @functools.cached_property
    def vocab_size(self) -> int:
        return int(self._api.llama_vocab_n_tokens(self._vocab))

    @functools.cached_property
    def eog_ids(self) -> tuple[int, ...]:
        return tuple(t for t in range(self.vocab_size) if self._api.llama_vocab_is_eog(self._vocab, t))

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids; `UsageError` for text that is not valid Unicode or is absurdly long."""
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise UsageError("the prompt is not valid Unicode text", where="prompt") from error
        if len(data) > MAX_TEXT:
            raise UsageError(f"a prompt of {len(data)} bytes", where="prompt", hint=f"at most {MAX_TEXT} are taken")
        capacity = len(data) + 16
        buffer = (ctypes.c_int32 * capacity)()
        count = self._api.llama_tokenize(self._vocab, data, len(data), buffer, capacity, add_special, parse_special)
        if count < 0:
            raise UsageError("the prompt cannot be tokenized", where="prompt")
        return list(buffer[:count])

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.token_bytes(i) for i in ids).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return self._piece(token, special=False)

    def _piece(self, token: int, *, special: bool) -> bytes:
        if not 0 <= token < self.vocab_size:
            raise UsageError(f"token id {token} is outside 0..{self.vocab_size - 1}", where="tokens")
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            written = self._api.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if written >= 0:
                return buffer.raw[:written]
            size = -written

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, add_generation_prompt: bool = True
    ) -> str:
        return render_chat(
            self._template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            bos_token=self._special("bos"),
            eos_token=self._special("eos"),
        )

    def encode_chat(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Token ids of a conversation; the template writes the special tokens itself, so none is added twice."""
        text = self.apply_chat_template(messages, tools=tools)
        bos = self._special("bos")
        return self.encode(text, add_special=not (bos and text.startswith(bos)) and self._adds_bos())

    def _adds_bos(self) -> bool:
        return bool(self._api.llama_vocab_get_add_bos(self._vocab))

    def _special(self, name: str) -> str:
        token = int(getattr(self._api, f"llama_vocab_{name}")(self._vocab))
        return self._piece(token, special=True).decode(errors="replace") if token >= 0 else ""
