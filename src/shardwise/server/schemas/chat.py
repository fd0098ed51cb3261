"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shardwise.server.schemas.common import AFew, Generating, JsonKind, Lenient, Text


class ContentPart(BaseModel):
    """A part of a message. Only text is understood; others are refused by name, not by shape."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str
    text: Text | None = None


class FunctionCall(Lenient):
    """A call that the model made: `arguments` is JSON text."""

    name: Annotated[str, Field(max_length=256)]
    arguments: Text = "{}"


class ToolCallPart(Lenient):
    """A call in an assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Lenient):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | AFew[ContentPart] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: AFew[ToolCallPart] | None = None
    tool_call_id: str | None = None


class FunctionSpec(Lenient):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Lenient):
    """A tool; functions only."""

    type: Literal["function"]
    function: FunctionSpec


class FunctionName(Lenient):
    """Names one function."""

    name: str


class ToolChoice(Lenient):
    """Forces one function."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(Lenient):
    """`json_schema` of a response format."""

    name: Annotated[str, Field(max_length=64)]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Lenient):
    """text | json_object | json_schema."""

    type: JsonKind
    json_schema: JsonSchema | None = None


class ChatRequest(Generating):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[AFew[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: AFew[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: AFew[Literal["text"]] | None = None
