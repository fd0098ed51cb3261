"""What is refused before it reaches a stage."""

from __future__ import annotations

import pytest

from shardwise.errors import UsageError
from shardwise.session.request import MAX_GRAMMAR_ALTERNATIVES, GenerationRequest, check_request, num_alternatives
from shardwise.transport.messages import SamplingSettings


def asking(grammar: str) -> GenerationRequest:
    return GenerationRequest(prompt=(1,), sampling=SamplingSettings(grammar=grammar))


@pytest.mark.parametrize(
    ("grammar", "found"),
    [
        ('root ::= "a"', 0),
        ('root ::= "a" | "b" | "c"', 2),
        ('root ::= ("a"? [b-z]* x+){2,3}\nx ::= "y"', 4),
        ('root ::= "|?*+{" [|?*+{\\]|] "\\"|" # | or ?\n', 0),
        ('root ::= "a|b', 0),  # it never ends: llama.cpp will say so
    ],
)
def test_alternatives_are_counted_outside_literals(grammar: str, found: int) -> None:
    assert num_alternatives(grammar) == found


def test_a_grammar_with_too_many_alternatives_is_refused() -> None:
    most = " | ".join(f'"{n}"' for n in range(MAX_GRAMMAR_ALTERNATIVES + 1))
    check_request(asking(f"root ::= {most}"), 256)
    with pytest.raises(UsageError, match=f"{MAX_GRAMMAR_ALTERNATIVES + 1} alternatives"):
        check_request(asking(f"root ::= ({most})+"), 256)


def test_a_megabyte_is_counted_quickly() -> None:
    for grammar in ('"' * 2**20, "[" * 2**20, "\\" * 2**20, '"\\' * 2**19, "#" * 2**20):
        assert num_alternatives(grammar) == 0
