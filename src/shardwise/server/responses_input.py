"""A Responses request as the chat request that means the same."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from shardwise.server.problems import invalid
from shardwise.server.schemas.chat import ChatRequest
from shardwise.server.schemas.responses import InputItem, ResponseRequest

_SHARED = (
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "logit_bias", "top_k", "min_p", "typical_p",
    "repetition_penalty", "grammar", "parallel_tool_calls",
)  # fmt: skip


def as_chat(body: ResponseRequest) -> ChatRequest:
    """Raises a `Problem` for items that lack what their type needs."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SHARED}
    fields |= {"model": body.model, "messages": _messages(body), "max_completion_tokens": body.max_output_tokens}
    if body.tools:
        fields["tools"] = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in body.tools]
    if isinstance(body.tool_choice, str):
        fields["tool_choice"] = body.tool_choice
    elif body.tool_choice is not None:
        fields["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    wanted = body.text.format if body.text is not None else None
    if wanted is not None:
        fields["response_format"] = {"type": wanted.type}
        if wanted.type == "json_schema":
            fields["response_format"]["json_schema"] = {"name": wanted.name or "answer", "schema": wanted.schema_}
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise invalid(first["msg"], ".".join(str(part) for part in first["loc"])) from error


def _messages(body: ResponseRequest) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    if body.instructions:
        out.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*out, {"role": "user", "content": body.input}]
    for index, item in enumerate(body.input):
        out.append(_message(item, f"input[{index}]"))
    return out


def _message(item: InputItem, where: str) -> dict[str, Any]:
    if item.type == "function_call":
        if item.name is None or item.call_id is None:
            raise invalid(f"{where}: a function_call needs name and call_id", "input")
        function = {"name": item.name, "arguments": item.arguments or "{}"}
        return {"role": "assistant", "tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}
    if item.type == "function_call_output":
        if item.call_id is None or item.output is None:
            raise invalid(f"{where}: a function_call_output needs call_id and output", "input")
        return {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
    if item.role is None or item.content is None:
        raise invalid(f"{where}: a message needs role and content", "input")
    content = item.content if isinstance(item.content, str) else [part.model_dump() for part in item.content]
    return {"role": item.role, "content": content}
