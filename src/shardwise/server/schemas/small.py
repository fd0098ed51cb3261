"""`/v1/embeddings`, `/tokenize`, `/detokenize`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shardwise.server.schemas.chat import Message
from shardwise.server.schemas.common import AFew, Body, Many, Prompts, Text, TokenId


class EmbeddingRequest(Body):
    """Body of `/v1/embeddings`."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=65536)] | None = None
    user: str | None = None


class TokenizeRequest(Body):
    """Body of `/tokenize`: exactly one of `content`, `prompt` (the same) and `messages` (through the chat template)."""

    model: str | None = None
    content: Text | None = None
    prompt: Text | None = None
    messages: Annotated[AFew[Message], Field(min_length=1)] | None = None
    add_special: bool = True
    parse_special: bool = True
    with_pieces: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        if sum(part is not None for part in (self.content, self.prompt, self.messages)) != 1:
            raise ValueError("give exactly one of 'content', 'prompt' and 'messages'")
        return self


class DetokenizeRequest(Body):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: Annotated[Many[TokenId], Field(max_length=1_000_000)]


class TokenizeAnswer(Body):
    """Ids and how many; `pieces` are the texts of the single tokens."""

    tokens: list[int]
    count: int
    max_model_len: int
    pieces: list[str] | None = None


class DetokenizeAnswer(Body):
    """The text."""

    content: str
    prompt: str
