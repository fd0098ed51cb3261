"""Tool calls in generated text: which notation a model uses, and reading it as it streams.

A notation is data (`ToolFormat`). It is chosen by what the model's chat template mentions. While a stream might be at the start
of a call its text is held back; text outside calls goes through at once. What looks like a call but does not parse is given
out as text: nothing the model said is lost.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

from shardwise.server.gbnf import literal
from shardwise.server.json_grammar import SchemaGrammar


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written. `start` opens a call (or a list), `end` closes it; an empty `end` is the end of the text."""

    name: str
    mark: str  # what the chat template mentions
    start: str
    end: str
    style: str  # json | xml | pythonic-name
    arguments_key: str = "arguments"
    is_list: bool = False


FORMATS = (
    ToolFormat("qwen-xml", "<function=", "<tool_call>", "</tool_call>", "xml"),
    ToolFormat("hermes", "<tool_call>", "<tool_call>", "</tool_call>", "json"),
    ToolFormat("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", "", "json", is_list=True),
    ToolFormat("llama3", "<|python_tag|>", "<|python_tag|>", "", "json", "parameters"),
    ToolFormat("llama3-json", '"parameters": dictionary of argument', "", "", "json", "parameters"),
    ToolFormat("granite", "<|tool_call|>", "<|tool_call|>", "", "json", is_list=True),
    ToolFormat("command-r", "Action:", "Action:", "", "json", "parameters", is_list=True),
)
GENERIC = ToolFormat("generic", "", "<tool_call>", "</tool_call>", "json")


def format_of_template(template: str | None) -> ToolFormat:
    """The notation that a chat template teaches; GENERIC where it knows no tools."""
    if template and "tools" in template:
        for known in FORMATS:
            if known.mark in template:
                return known
    return GENERIC


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; `arguments` is JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


Piece = str | ToolCall


class ToolCallReader:
    """Splits a stream into text and calls."""

    def __init__(self, tool_format: ToolFormat, names: set[str]) -> None:
        self._format = tool_format
        self._names = names
        self._held = ""
        self._in_call = False
        self.found_calls = False

    def feed(self, text: str) -> list[Piece]:
        """What can be given out now."""
        self._held += text
        out: list[Piece] = []
        while True:
            if self._in_call:
                if not self._format.end or self._format.end not in self._held:
                    return out
                inner, self._held = self._held.split(self._format.end, 1)
                self._in_call = False
                out += self._read(inner, self._format.end)
                continue
            start, skip = self._find_start()
            if start < 0:
                return self._text(out, self._held, keep=0)
            if skip == 0:  # perhaps the beginning of a start mark
                return self._text(out, self._held[:start], keep=len(self._held) - start)
            if self._held[:start].strip() or not self.found_calls:
                self._text(out, self._held[:start].rstrip() if not self._held[:start].strip() else self._held[:start], keep=None)
            self._held = self._held[start + skip :]
            self._in_call = True

    def close(self) -> list[Piece]:
        """The rest, at the end of the stream."""
        held, self._held = self._held, ""
        if self._in_call:
            self._in_call = False
            return self._read(held, "")
        if self.found_calls and not held.strip():
            return []
        return [held] if held else []

    def _find_start(self) -> tuple[int, int]:
        """Where a call starts and how long its mark is; length 0 = it may start there; -1 = nowhere."""
        mark = self._format.start
        if not mark:  # bare JSON: a call is the whole answer
            stripped = self._held.lstrip()
            if not stripped:
                return (0, 0)
            if stripped[0] == "{" and not self.found_calls:
                self._in_call = True
                return (len(self._held) - len(stripped), 0)
            return (-1, 0)
        index = self._held.find(mark)
        if index >= 0:
            return (index, len(mark))
        for length in range(min(len(mark) - 1, len(self._held)), 0, -1):
            if mark.startswith(self._held[-length:]):
                return (len(self._held) - length, 0)
        return (-1, 0)

    def _text(self, out: list[Piece], text: str, keep: int | None) -> list[Piece]:
        if text and not (self.found_calls and not text.strip()):
            out.append(text)
        if keep is not None:
            self._held = self._held[len(self._held) - keep :] if keep else ""
        return out

    def _read(self, inner: str, end: str) -> list[Piece]:
        calls = _read_xml(inner) if self._format.style == "xml" else _read_json(inner)
        known = [call for call in calls if call.name in self._names]
        if not known or len(known) != len(calls):
            return [f"{self._format.start}{inner}{end}"]
        self.found_calls = True
        return list(known)


def calls_grammar(tool_format: ToolFormat, functions: list[tuple[str, dict[str, Any] | None]], *, parallel: bool) -> str:
    """GBNF that allows calls of these functions and nothing else."""
    grammar = SchemaGrammar()
    options = []
    for name, parameters in functions:
        schema = parameters or {"type": "object"}
        arguments = grammar.add_schema(schema)
        quoted = literal(json.dumps(name))
        key = literal(f'"{tool_format.arguments_key}"')
        named = f'"\\"name\\"" ws ":" ws {quoted}'
        options.append(grammar.add_rule("call", f'"{{" ws {named} ws "," ws {key} ws ":" ws {arguments} ws "}}"'))
    call = grammar.add_rule("calls", " | ".join(options))
    if tool_format.is_list:
        several = f'(ws "," ws {call})*' if parallel else '""'
        return grammar.text(f'{literal(tool_format.start)} ws "[" ws {call} {several} ws "]"')
    if not tool_format.end:
        return grammar.text(f"{literal(tool_format.start)} {call}")
    once = f"{literal(tool_format.start)} ws {call} ws {literal(tool_format.end)}"
    return grammar.text(f"{once} (ws {once})*" if parallel else once)


def _read_json(text: str) -> list[ToolCall]:
    """Calls written as an object, a list of objects, or several objects one after the other."""
    decoder = json.JSONDecoder()
    calls: list[ToolCall] = []
    rest = text.strip().strip("`").removeprefix("json").strip()
    while rest:
        try:
            value, used = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        for item in value if isinstance(value, list) else [value]:
            call = _call_of(item)
            if call is None:
                return []
            calls.append(call)
        rest = rest[used:].lstrip(" \n\t;,")
    return calls


def _call_of(item: Any) -> ToolCall | None:
    if isinstance(item, dict) and isinstance(item.get("function"), dict):
        item = item["function"]
    if not isinstance(item, dict):
        return None
    name = item.get("name", item.get("tool_name"))
    arguments = item.get("arguments", item.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip().startswith("{") and _is_json(arguments) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _read_xml(text: str) -> list[ToolCall]:
    """`<function=NAME><parameter=KEY>VALUE</parameter>...</function>`; values are JSON where they parse as JSON."""
    calls = []
    for name, inner in re.findall(r"<function=([^>\n]+)>(.*?)(?:</function>|$)", text, re.DOTALL):
        arguments = {
            key.strip(): _value(value.strip("\n"))
            for key, value in re.findall(r"<parameter=([^>\n]+)>(.*?)</parameter>", inner, re.DOTALL)
        }
        calls.append(ToolCall(name.strip(), json.dumps(arguments, ensure_ascii=False)))
    return calls or _read_json(text)


def _value(text: str) -> Any:
    return json.loads(text) if _is_json(text) else text
