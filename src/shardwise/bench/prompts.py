"""Prompts of an exact length in tokens, the same for every engine. Pure but for the tokenizer that is handed in."""

from __future__ import annotations

from typing import Protocol

TEXT = (
    "On a shelf in the hall stood three old computers, and each of them knew a third of the story. "
    "The first one had learned how words begin, the second how sentences turn, and the third how things end. "
    "Whenever a child asked a question, a small light went along the cable from one to the next, and in the evening "
    "the house was full of answers. Nobody remembered who had put the machines there, but everybody knew that the "
    "wireless link in the attic was slow, and that the cable under the stairs was not to be touched. "
)


class Encoder(Protocol):
    """What turns text into token ids."""

    def encode(self, text: str) -> list[int]: ...


def prompt_ids(tokenizer: Encoder, num_tokens: int, user: int = 0) -> tuple[int, ...]:
    """Exactly `num_tokens` ids; each user's text begins at another place, so that nothing can be shared."""
    start = (user * 97) % len(TEXT)
    text = TEXT[start:] + TEXT[:start]
    ids = tokenizer.encode(text)
    while len(ids) < num_tokens:
        text += text
        ids = tokenizer.encode(text)
    return tuple(ids[:num_tokens])
