"""What the request bodies share."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

MAX_TEXT_CHARS = 4_000_000
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]

T = TypeVar("T")
# One wrong element is reported, not a million: a list of four megabytes would stop all streams for seconds.
Many = Annotated[list[T], Field(fail_fast=True)]
AFew = Annotated[list[T], Field(fail_fast=True, max_length=4096)]
Prompts = Text | AFew[Text] | Many[TokenId] | AFew[Many[TokenId]]


class Body(BaseModel):
    """Strict: unknown fields and coerced types are refused, as OpenAI does."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Lenient(BaseModel):
    """For parts that clients send back with more fields than they got (messages, tool calls)."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """`include_usage`: a last chunk with the token counts."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # nothing is padded here


class Sampling(Body):
    """Sampling; the second half are extensions that llama.cpp's and vLLM's clients know."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=1024)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    grammar: Annotated[str, Field(max_length=65536, description="GBNF")] | None = None


class WithoutEffect(Body):
    """Fields that change nothing here and are accepted so that clients work unchanged."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class Generating(Sampling, WithoutEffect):
    """One or more generations from one prompt."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: StopText | AFew[StopText] | None = None

    def stop_sequences(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        """A usage chunk at the end of the stream."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ErrorObject(BaseModel):
    """OpenAI's error object."""

    model_config = ConfigDict(extra="allow")
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer with a status of 400 or more."""

    error: ErrorObject


JsonKind = Literal["text", "json_object", "json_schema"]
