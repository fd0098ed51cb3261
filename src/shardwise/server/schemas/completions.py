"""`/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardwise.server.schemas.common import Generating, Prompts


class CompletionRequest(Generating):
    """Body of `/v1/completions`."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: None = None
