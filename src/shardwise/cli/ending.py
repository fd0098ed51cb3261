"""What is said after an answer: that it was cut off, that a worker was lost meanwhile. A line each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwise.units import format_duration

if TYPE_CHECKING:
    from shardwise.session.request import GenerationRequest, Recovery, Token


def cut_line(tokens: Sequence[Token], request: GenerationRequest, context_tokens: int) -> str:
    """Why an answer stops where it was not at its end; empty where it was."""
    if not tokens or tokens[-1].finish_reason != "length":
        return ""
    if len(tokens) >= request.max_tokens:
        said = f"stopped at {len(tokens)} tokens (-n)"
    else:
        said = f"stopped: the context of {context_tokens} tokens is full (--ctx)"
    return said + ("; what the grammar or schema asks for is not complete" if request.sampling.grammar else "")


def recovery_line(recovery: Recovery) -> str:
    """A lost stage or a move, how long nothing came, and whether the tokens are those of an undisturbed run."""
    grade = {
        "exact": "the same tokens",
        "fast": "read again in large chunks, so tokens may differ",
        "fallback": "another model goes on",
    }.get(recovery.grade, recovery.grade)
    token, stall = recovery.at_token, format_duration(recovery.stall_s)
    if recovery.action.startswith(recovery.cause):  # nobody was lost: a new split, a stage that moves
        return f"{recovery.cause} at token {token}: nothing came for {stall}, {grade}"
    found = re.search(r"stage \d+", recovery.action)
    why = recovery.cause.partition(":")[0]
    stage = found[0] if found else "a stage"
    return f"{stage} was lost at token {token} and back after {stall}, {grade} ({why}; {recovery.action})"
