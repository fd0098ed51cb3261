"""From a validated request to what is submitted: prompt tokens, sampling, grammar, limits. Pure but for tokenizing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from starlette.requests import Request

from shardwise.errors import ShardwiseError, UsageError
from shardwise.records import replace
from shardwise.server.activity import Active
from shardwise.server.engine import Engine
from shardwise.server.figures import context_tokens
from shardwise.server.gbnf import check_foreign
from shardwise.server.generation import Generation
from shardwise.server.problems import Problem, from_error, impossible, invalid
from shardwise.server.sampling import sampling_settings
from shardwise.server.schemas.common import Generating, Sampling
from shardwise.server.state import ServerState, client_of, request_id_of
from shardwise.session.request import GenerationRequest
from shardwise.transport.messages import SamplingSettings

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Tokenizing and grammars can take milliseconds: not in the loop. Errors come out as problems."""
    try:
        return await asyncio.to_thread(work)
    except ShardwiseError as error:
        raise from_error(error) from error


def output_limit(engine: Engine, prompt_tokens: int, asked: int | None, param: str) -> int:
    """How many tokens may be generated; 400 where the prompt leaves no room."""
    room = context_tokens(engine) - prompt_tokens
    if room < 1 or (asked is not None and asked > room):
        wanted = f"{prompt_tokens} tokens of prompt" + (f" and {asked} of output" if asked is not None else "")
        raise Problem(
            400,
            f"this model's context is {context_tokens(engine)} tokens, and {wanted} do not fit; shorten one of them",
            param=param,
            code="context_length_exceeded",
        )
    return room if asked is None else asked


def grammar_of(fields: Sampling, from_format: str) -> str:
    """The grammar of the request: its own, or the one of its response format or tools, not both."""
    own = fields.grammar or ""
    if own and from_format:
        raise invalid("give 'grammar' or a response format (or a forced tool), not both", "grammar")
    if own:
        try:
            check_foreign(own)
        except UsageError as error:
            raise impossible(error.message, "grammar", "invalid_grammar") from error
    return own or from_format


def check_choices(fields: Generating, state: ServerState) -> int:
    """n within the server's limit; the stop list as well."""
    num = fields.n or 1
    if num > state.settings.max_choices:
        raise invalid(f"n = {num} is more than the {state.settings.max_choices} choices that this server makes", "n")
    if len(fields.stop_sequences()) > state.settings.max_stop_sequences:
        raise invalid(f"at most {state.settings.max_stop_sequences} stop sequences are taken", "stop")
    return num


def make_generation(
    request: Request,
    state: ServerState,
    fields: Sampling,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: Sequence[int],
    choices: int = 1,
    stop: tuple[str, ...] = (),
    grammar: str = "",
    num_logprobs: int = -1,
    endpoint: str,
) -> Generation:
    """`choices` generations of each prompt, seeds counted up so that they differ and yet repeat."""
    engine = state.engine()
    base = sampling_settings(fields, vocab_size=engine.model.vocab_size, grammar=grammar, num_logprobs=num_logprobs)
    request_id = state.activity.free_id(request_id_of(request))
    traceparent = request.headers.get("traceparent", "")
    traced = state.traces.wants(traceparent)
    requests = [
        GenerationRequest(
            prompt=tuple(prompt),
            max_tokens=limit,
            sampling=with_seed(base, choice),
            stop=stop,
            traced=traced,
        )
        for prompt, limit in zip(prompts, max_tokens)
        for choice in range(choices)
    ]
    num_prompt = sum(len(prompt) for prompt in prompts)
    state.metrics.prompt_tokens.inc(num_prompt)
    active = Active(
        id=request_id,
        client=client_of(request).name,
        endpoint=endpoint,
        prompt_tokens=num_prompt,
        max_tokens=sum(max_tokens) * choices,
        choices=len(requests),
        started_s=state.clock.now_s(),
    )
    state.traces.begin(request_id, traceparent, {"shardwise.prompt_tokens": num_prompt, "shardwise.choices": len(requests)})
    return Generation(state, requests, active, client_of(request))


def with_seed(base: SamplingSettings, choice: int) -> SamplingSettings:
    """The same settings with the seed of one choice."""
    return base if choice == 0 else replace(base, seed=(base.seed + choice) & (2**63 - 1))
