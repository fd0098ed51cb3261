"""What a client asks for and what it gets back, token by token."""

from __future__ import annotations

import re

from shardwise.errors import ContextFull, UsageError
from shardwise.records import Record
from shardwise.transport.messages import MAX_GRAMMAR_BYTES, SamplingSettings, TokenLogprob, Visit


class GenerationRequest(Record):
    """One generation from token ids."""

    prompt: tuple[int, ...]
    max_tokens: int = 128
    sampling: SamplingSettings = SamplingSettings()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    traced: bool = False


MAX_GRAMMAR_ALTERNATIVES = 2000  # llama.cpp tries each of them with every token of the vocabulary: 1 to 2 s a token
_LITERALS = re.compile(r'"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|#[^\n]*', re.DOTALL)  # or to the end: it must not look back
_BRANCHES = re.compile(r"[|?*+{]")
MAX_LOGPROBS = 20_000  # of one token; 15 bytes each, for every token


def check_request(request: GenerationRequest, context_tokens: int) -> None:
    """`UsageError` or `ContextFull` for what can never be generated."""
    if not request.prompt:
        raise UsageError("the prompt is empty", where="prompt")
    if request.max_tokens < 1:
        raise UsageError(f"max_tokens = {request.max_tokens}", where="max_tokens", hint="at least 1")
    if request.sampling.num_logprobs > MAX_LOGPROBS:
        raise UsageError(f"{request.sampling.num_logprobs} log probabilities", where="logprobs", hint=f"at most {MAX_LOGPROBS}")
    _check_grammar(request.sampling.grammar)
    if len(request.prompt) >= context_tokens:
        raise ContextFull(
            f"the prompt has {len(request.prompt)} tokens, the context holds {context_tokens}",
            where="prompt",
            hint="shorten it or raise --ctx",
            needed_tokens=len(request.prompt) + 1,
            context_tokens=context_tokens,
        )


def num_alternatives(grammar: str) -> int:
    """Ways that a GBNF grammar has to go on, at most: bars, and pieces that may be left out or repeated."""
    return len(_BRANCHES.findall(_LITERALS.sub("", grammar)))


def _check_grammar(grammar: str) -> None:
    try:
        num_bytes = len(grammar.encode())
    except UnicodeEncodeError as error:
        raise UsageError("the grammar is not valid Unicode text", where="grammar") from error
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise UsageError(f"a grammar of {num_bytes} bytes", where="grammar", hint=f"at most {MAX_GRAMMAR_BYTES} are taken")
    if (found := num_alternatives(grammar)) > MAX_GRAMMAR_ALTERNATIVES:
        hint = f"at most {MAX_GRAMMAR_ALTERNATIVES} are taken"
        raise UsageError(f"a grammar with {found} alternatives", where="grammar", hint=hint)


class Token(Record):
    """One generated token.

    `text` holds the characters that became complete and safe to show with it (possibly none: a token may end inside a
    UTF-8 character or at what could be the beginning of a stop string). `finish_reason` is empty until the last one:
    stop | length | cancelled.
    """

    id: int
    text: str
    position: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()
    finish_reason: str = ""
    elapsed_s: float = 0.0  # since the request was submitted
    visits: tuple[Visit, ...] = ()


class Readiness(Record):
    """Whether generation works, truthfully: `ready` means a token really went through every stage lately."""

    ready: bool
    reason: str = ""
    last_token_age_s: float | None = None
    loading_progress: float | None = None
    expected_s: float | None = None


class Recovery(Record):
    """One recovery of a session, as reported in the `recoveries` of a result."""

    at_token: int
    cause: str
    action: str
    stall_s: float
    grade: str = "exact"  # exact | fast | fallback (another model goes on with the sentence)
    predicted_stall_s: float = 0.0
