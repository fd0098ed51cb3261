"""The pieces of GBNF, llama.cpp's grammar notation: literals, repetition, JSON itself; and limits on foreign grammars."""

from __future__ import annotations

import re

from shardwise.errors import UsageError
from shardwise.session.request import MAX_GRAMMAR_ALTERNATIVES, num_alternatives

MAX_REPEAT = 1000  # llama.cpp refuses more than 2000 elements in one repetition
MAX_GRAMMAR_BYTES = 64 * 2**10
MAX_GRAMMAR_RULES = 1000
MAX_GRAMMAR_NESTING = 64  # llama.cpp parses by recursion

PRIMITIVES = {
    "ws": '" "? | "\\n" [ \\t]{0,8}',
    "value": "object | array | string | number | boolean | null",
    "object": '"{" ws (string ws ":" ws value (ws "," ws string ws ":" ws value)*)? ws "}"',
    "array": '"[" ws (value (ws "," ws value)*)? ws "]"',
    "string": '"\\"" char* "\\""',
    # No control characters, and no escaped halves of surrogate pairs: every string is valid on its own.
    "char": '[^"\\\\\\x00-\\x1F\\x7F] | "\\\\" (["\\\\/bfnrt] | "u" ([0-9a-cA-CefEF] hex{3} | [dD] [0-7] hex{2}))',
    "hex": "[0-9a-fA-F]",
    "number": '"-"? unsigned',
    "unsigned": '("0" | [1-9] [0-9]{0,15}) ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,2})?',
    "integer": '"-"? ("0" | [1-9] [0-9]{0,17})',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "date": '[0-9]{4} "-" ("0" [1-9] | "1" [0-2]) "-" ("0" [1-9] | "1" [0-9] | "2" [0-8])',
    "time": '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{1,6})? ("Z" | [-+] [01] [0-9] ":" [0-5] [0-9])',
    "date-time": 'date "T" time',
    "uuid": 'hex{8} "-" hex{4} "-" hex{4} "-" hex{4} "-" hex{12}',
}


def literal(text: str) -> str:
    """Text as a GBNF literal."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    out = "".join(escapes.get(c, c if c >= " " and c != "\x7f" else f"\\x{ord(c):02X}") for c in text)
    return f'"{out}"'


def repeat(item: str, low: int, high: int | None) -> str:
    """`item` from `low` to `high` times."""
    if high is None:
        return f"{item}*" if low == 0 else f"{item}{{{low},}}"
    if high == 0:
        return '""'
    return f"{item}{{{low},{high}}}"


def check_foreign(grammar: str) -> None:
    """Bounds for a grammar that a client wrote; whether it is valid only llama.cpp knows, and the stage says so."""
    problem = ""
    if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        problem = f"is larger than {MAX_GRAMMAR_BYTES} bytes"
    elif grammar.count("::=") > MAX_GRAMMAR_RULES:
        problem = f"has more than {MAX_GRAMMAR_RULES} rules"
    elif "\x00" in grammar:
        problem = "holds a NUL character"
    elif not re.search(r"(?m)^\s*root\s*::=", grammar):
        problem = "has no rule 'root ::= ...'"
    elif _nesting(grammar) > MAX_GRAMMAR_NESTING:
        problem = f"nests deeper than {MAX_GRAMMAR_NESTING} parentheses"
    elif num_alternatives(grammar) > MAX_GRAMMAR_ALTERNATIVES:
        problem = f"has more than {MAX_GRAMMAR_ALTERNATIVES} alternatives"
    if problem:
        raise UsageError(f"the grammar {problem}", where="grammar")


def _nesting(grammar: str) -> int:
    depth = deepest = 0
    for character in grammar:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest
