"""From token bytes to text that may be shown: whole UTF-8 characters, and nothing that might become a stop string."""

from __future__ import annotations

import codecs
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Text to ids and back, as the model's own tokenizer does it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eog_ids(self) -> tuple[int, ...]:
        """Ids that end a generation."""
        ...

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for; empty for control tokens."""
        ...

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, add_generation_prompt: bool = True
    ) -> str: ...


class TextStream:
    """Feeds on token bytes, gives text. Once a stop string was seen nothing more comes out."""

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = tuple(s for s in stop if s)
        self._held = ""
        self.stopped = False

    def feed(self, data: bytes) -> str:
        """Characters that became complete and safe; sets `stopped` when a stop string is complete (it is left out)."""
        if self.stopped:
            return ""
        self._held += self._decoder.decode(data)
        return self._release()

    def finish(self) -> str:
        """What is left at the end: held characters, and a replacement character for a cut one."""
        if self.stopped:
            return ""
        self._held += self._decoder.decode(b"", final=True)
        text = self._release()
        rest, self._held = self._held, ""
        return text if self.stopped else text + rest

    def _release(self) -> str:
        hits = [at for s in self._stop if (at := self._held.find(s)) >= 0]
        if hits:
            self.stopped = True
            text, self._held = self._held[: min(hits)], ""
            return text
        keep = max((_overlap(self._held, s) for s in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
