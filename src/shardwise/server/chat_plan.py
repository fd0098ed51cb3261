"""What a chat request asks for, decided once: tools and their notation, the grammar, the prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from shardwise.errors import UsageError
from shardwise.server.chat_output import ChatChoice
from shardwise.server.engine import Engine
from shardwise.server.json_grammar import any_object_gbnf, schema_to_gbnf
from shardwise.server.problems import Problem, impossible, invalid
from shardwise.server.prompts import render_chat
from shardwise.server.schemas.chat import ChatRequest, ResponseFormat, Tool, ToolChoice
from shardwise.server.settings import ServerSettings
from shardwise.server.toolcalls import ToolCallReader, ToolFormat, calls_grammar, format_of_template


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """Prompt tokens, grammar, and how to read what comes back."""

    prompt: list[int]
    grammar: str
    tool_format: ToolFormat
    tool_names: frozenset[str]
    marks: dict[int, str]

    def choice(self, engine: Engine, index: int, num_top: int) -> ChatChoice:
        """A fresh reader for one choice."""
        reader = ToolCallReader(self.tool_format, set(self.tool_names)) if self.tool_names else None
        return ChatChoice(index, engine.tokenizer, reader, self.marks, num_top)


def plan_chat(engine: Engine, body: ChatRequest, settings: ServerSettings) -> ChatPlan:
    """Raises a `Problem` for what this model cannot do."""
    tools = offered_tools(body, settings)
    tool_format = format_of_template(engine.model.tokenizer.chat_template)
    forced = _forced(body, tools)
    grammar = response_grammar(body.response_format, settings)
    if forced:
        if grammar:
            raise invalid("a forced tool call cannot be combined with a response format", "tool_choice")
        functions = [(tool.function.name, tool.function.parameters) for tool in forced]
        grammar = from_schema(
            lambda: calls_grammar(tool_format, functions, parallel=body.parallel_tool_calls is not False), "tools"
        )
    return ChatPlan(
        prompt=render_chat(engine, body.messages, tools, tool_format),
        grammar=grammar,
        tool_format=tool_format,
        tool_names=frozenset(tool.function.name for tool in tools),
        marks=_marks(engine, tool_format) if tools else {},
    )


def offered_tools(body: ChatRequest, settings: ServerSettings) -> list[Tool]:
    """The tools that the model is told about."""
    tools = body.tools or []
    if body.tool_choice not in (None, "none", "auto") and not tools:
        raise invalid("tool_choice asks for a tool, and there are no tools", "tool_choice")
    if len(tools) > settings.max_tools:
        raise invalid(f"at most {settings.max_tools} tools are taken", "tools")
    names = [tool.function.name for tool in tools]
    if len(set(names)) != len(names):
        raise invalid("two tools have the same name", "tools")
    for tool in tools:
        check_schema_size(tool.function.parameters, settings, "tools")
    return [] if body.tool_choice == "none" else tools


def response_grammar(wanted: ResponseFormat | None, settings: ServerSettings) -> str:
    """GBNF of a response format; empty for text."""
    if wanted is None or wanted.type == "text":
        return ""
    if wanted.type == "json_object":
        return any_object_gbnf()
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise invalid("response_format of type json_schema needs json_schema.schema", "response_format")
    check_schema_size(wanted.json_schema.schema_, settings, "response_format")
    schema = wanted.json_schema.schema_
    return from_schema(lambda: schema_to_gbnf(schema), "response_format")


def from_schema(make: Callable[[], str], param: str) -> str:
    """A grammar, or 422 with what the schema has that cannot be honoured."""
    try:
        return make()
    except UsageError as error:
        raise impossible(error.message, param, "invalid_schema") from error


def check_schema_size(schema: dict[str, Any] | None, settings: ServerSettings, param: str) -> None:
    """Schemas are small; large ones make grammars that cost the last stage milliseconds a token."""
    if schema is not None and len(msgspec.json.encode(schema)) > settings.max_schema_bytes:
        raise impossible(f"a JSON schema may have at most {settings.max_schema_bytes} bytes", param, "schema_too_large")


def _forced(body: ChatRequest, tools: list[Tool]) -> list[Tool]:
    if body.tool_choice == "required":
        return tools
    if isinstance(body.tool_choice, ToolChoice):
        wanted = body.tool_choice.function.name
        chosen = [tool for tool in tools if tool.function.name == wanted]
        if not chosen:
            raise Problem(400, f"tool_choice names '{wanted[:80]}', which is not among the tools", param="tool_choice")
        return chosen
    return []


def _marks(engine: Engine, tool_format: ToolFormat) -> dict[int, str]:
    """Tokens that are a mark of the notation and have no text of their own (control tokens)."""
    out = {}
    for mark in (tool_format.start, tool_format.end):
        ids = engine.tokenizer.encode(mark, add_special=False, parse_special=True) if mark else []
        if len(ids) == 1 and not engine.tokenizer.token_bytes(ids[0]):
            out[ids[0]] = mark
    return out
