"""`/v1/responses`, text only. Nothing is stored, so there is nothing to refer back to."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from shardwise.server.schemas.chat import ContentPart
from shardwise.server.schemas.common import AFew, JsonKind, Lenient, Sampling, Text, WithoutEffect


class InputItem(Lenient):
    """A message, a call that the model made, or its result."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Text | AFew[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Text | None = None
    output: Text | None = None


class TextFormat(Lenient):
    """text | json_object | json_schema, flat."""

    type: JsonKind
    name: Annotated[str, Field(max_length=64)] | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(Lenient):
    """`text`."""

    format: TextFormat | None = None


class ResponseTool(Lenient):
    """A function, flat."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(Lenient):
    """Forces one function."""

    type: Literal["function"]
    name: str


class ResponseRequest(Sampling, WithoutEffect):
    """Body of `/v1/responses`."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    input: Text | Annotated[AFew[InputItem], Field(min_length=1)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    text: TextSettings | None = None
    tools: AFew[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    include: Annotated[list[str], Field(max_length=0)] | None = None
