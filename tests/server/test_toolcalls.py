"""Tool calls in text, whole and cut at every place; notations as data."""

from __future__ import annotations

import json

import pytest

from shardwise.server.toolcalls import (
    FORMATS,
    GENERIC,
    Piece,
    ToolCall,
    ToolCallReader,
    ToolFormat,
    calls_grammar,
    format_of_template,
)

BY_NAME = {one.name: one for one in (*FORMATS, GENERIC)}
TWO = '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": {"b": "</x>"}}</tool_call>'
XML = (
    "<tool_call>\n<function=f>\n<parameter=a>\n[1, 2]\n</parameter>\n<parameter=b>\ntea\n</parameter>\n</function>\n</tool_call>"
)
LIST = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
STRANGE = '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'
ONE = [("f", {"a": 1})]
CASES = [
    ("hermes", 'Sure.<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "Sure.", ONE),
    ("hermes", TWO, "", [("f", {}), ("g", {"b": "</x>"})]),
    ("qwen-xml", XML, "", [("f", {"a": [1, 2], "b": "tea"})]),
    ("mistral", LIST, "", [("f", {"a": 1}), ("g", {})]),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", ONE),
    ("llama3-json", '{"name": "f", "parameters": {"a": 1}}', "", ONE),
    ("llama3-json", "No call here.", "No call here.", []),
    ("llama3-json", '{"answer": 42}', '{"answer": 42}', []),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', "", ONE),
    ("generic", "just <b>text</b> with < signs <tool", "just <b>text</b> with < signs <tool", []),
    ("generic", "<tool_call>not json</tool_call> after", "<tool_call>not json</tool_call> after", []),
    ("generic", STRANGE, STRANGE, []),
    ("generic", '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", ONE),
]


def read(tool_format: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, object]]]:
    reader = ToolCallReader(tool_format, {"f", "g"})
    out: list[Piece] = [piece for text in pieces for piece in reader.feed(text)] + reader.close()
    text = "".join(piece for piece in out if isinstance(piece, str))
    return text, [(piece.name, json.loads(piece.arguments)) for piece in out if isinstance(piece, ToolCall)]


@pytest.mark.parametrize(("name", "text", "said", "calls"), CASES)
def test_reading_does_not_depend_on_where_the_stream_is_cut(name: str, text: str, said: str, calls: list[object]) -> None:
    for size in (1, 2, 3, 7, len(text)):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert read(BY_NAME[name], pieces) == (said, calls), size


def test_plain_text_is_not_held_back() -> None:
    reader = ToolCallReader(GENERIC, {"f"})
    assert reader.feed("Hello ") == ["Hello "]
    assert reader.feed("a < b <to") == ["a < b "]
    assert reader.feed("ast>") == ["<toast>"]


def test_the_template_tells_the_notation() -> None:
    assert format_of_template("{% if tools %}<tool_call>{% endif %}").name == "hermes"
    assert format_of_template("{% if tools %}[TOOL_CALLS]{% endif %}").name == "mistral"
    assert format_of_template("{{ messages }}") is GENERIC
    assert format_of_template(None) is GENERIC


@pytest.mark.parametrize("tool_format", BY_NAME.values(), ids=BY_NAME)
def test_every_notation_has_a_grammar(tool_format: ToolFormat) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    grammar = calls_grammar(tool_format, [("f", parameters), ("g", None)], parallel=True)
    assert grammar.startswith("root ::= ")
    assert tool_format.arguments_key in grammar
