"""Messages and tools -> prompt tokens, through the model's own chat template.

What a text model cannot read (images, audio, files) is refused by name. A template that knows no tools gets them in the system
message; one that knows no system or tool role gets their text in the user's turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shardwise.errors import UsageError
from shardwise.server.engine import Engine
from shardwise.server.figures import context_tokens
from shardwise.server.problems import impossible, invalid
from shardwise.server.schemas.chat import ContentPart, Message, Tool, ToolCallPart
from shardwise.server.toolcalls import GENERIC, ToolFormat

_LOOK_CHARS = 65536
_TEXT_PARTS = {"text", "input_text", "output_text", "refusal"}


def text_of(content: str | Sequence[ContentPart] | None, where: str) -> str:
    """The text of a message; 422 for parts that are not text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        if part.type not in _TEXT_PARTS:
            kind = part.type.removeprefix("input_").removesuffix("_url")[:40]
            raise impossible(f"this model reads text only, and {where}.content[{index}] is of type '{kind}'", "messages")
        text = part.text if part.type != "refusal" else (part.model_extra or {}).get("refusal")
        if not isinstance(text, str):
            raise invalid(f"{where}.content[{index}] has no text", "messages")
        texts.append(text)
    return "".join(texts)


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text content, arguments of calls as objects, `developer` as `system`."""
    out = []
    for index, message in enumerate(messages):
        plain: dict[str, Any] = {
            "role": {"developer": "system", "function": "tool"}.get(message.role, message.role),
            "content": text_of(message.content, f"messages[{index}]"),
        }
        if message.name is not None:
            plain["name"] = message.name
        if message.tool_call_id is not None:
            plain["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            plain["tool_calls"] = [_call(call) for call in message.tool_calls]
        out.append(plain)
    return out


def render_chat(engine: Engine, messages: Sequence[Message], tools: Sequence[Tool], tool_format: ToolFormat) -> list[int]:
    """Prompt tokens of a conversation."""
    plain = plain_messages(messages)
    specs = [tool.model_dump(exclude_none=True) for tool in tools]
    if tool_format is GENERIC and (specs or any(m.get("tool_calls") or m["role"] == "tool" for m in plain)):
        plain, specs = _with_generic_tools(plain, specs), []
    try:
        text = engine.tokenizer.apply_chat_template(plain, tools=specs or None)
    except UsageError as error:
        raise invalid(error.one_line(), "messages") from error
    return encode_prompt(engine, text)


def encode_bounded(
    engine: Engine, text: str, *, at_least: int = 0, add_special: bool = True, parse_special: bool = True
) -> list[int]:
    """Token ids of a text; 400 where they are clearly more than the context (or than `at_least`, where that is more).

    A long text is looked at in growing parts: what llama.cpp needs for a text full of control tokens grows with the square of
    its length, to minutes for four megabytes.
    """
    most, size = max(context_tokens(engine), at_least), _LOOK_CHARS
    while size < len(text):
        num = len(engine.tokenizer.encode(text[:size], add_special=add_special, parse_special=parse_special))
        if num > most + most // 4 + 64:  # the cut may have made a few more
            what = f"the first {size} characters of this text alone are {num} tokens"
            raise invalid(f"{what}, and at most {most} are taken; shorten it", "prompt", "context_length_exceeded")
        size *= 2
    return engine.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)


def encode_prompt(engine: Engine, text: str) -> list[int]:
    """Tokens of a prompt; a beginning-of-sequence token that the template wrote is not doubled."""
    ids = encode_bounded(engine, text)
    bos = engine.model.tokenizer.bos_id
    if bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    if not ids:
        raise invalid("the prompt is empty", "prompt")
    return ids


def token_prompts(engine: Engine, given: Sequence[str] | Sequence[int] | Sequence[Sequence[int]], param: str) -> list[list[int]]:
    """Texts, one list of ids, or several: as lists of ids. Raises a `Problem` for empty ones and unknown ids."""
    if isinstance(given, str):
        return [encode_prompt(engine, given)]
    texts = [one for one in given if isinstance(one, str)]
    if texts:
        return [encode_prompt(engine, text) for text in texts]
    numbers = [one for one in given if isinstance(one, int)]
    lists = [numbers] if numbers else [list(one) for one in given if not isinstance(one, str | int)]
    if not lists or not all(lists):
        raise invalid("the prompt is empty", param)
    largest = max(max(ids) for ids in lists)
    if largest >= engine.model.vocab_size:
        raise invalid(f"token id {largest} is not below the vocabulary's {engine.model.vocab_size}", param)
    return lists


def _call(call: ToolCallPart) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"type": "function", "id": call.id, "function": function}


def _arguments(text: str) -> Any:
    try:
        return json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text


def _with_generic_tools(messages: list[dict[str, Any]], specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    out = [_without_tool_roles(message) for message in messages]
    if not specs:
        return out
    listing = "\n".join(json.dumps(spec["function"], ensure_ascii=False) for spec in specs)
    explanation = (
        "You can call these functions (one JSON object a line):\n"
        f"{listing}\n"
        "To call one, answer with exactly this and nothing else:\n"
        '<tool_call>\n{"name": "FUNCTION", "arguments": {...}}\n</tool_call>'
    )
    if out[0]["role"] == "system":
        return [{"role": "system", "content": f"{out[0]['content']}\n\n{explanation}"}, *out[1:]]
    return [{"role": "system", "content": explanation}, *out]


def _without_tool_roles(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = "\n".join(
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in message["tool_calls"]
    )
    return {"role": message["role"], "content": f"{message['content']}\n{calls}".strip()}
