"""`POST /v1/completions`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from shardwise.server import sse
from shardwise.server.engine import Engine
from shardwise.server.generation import Generation, unless_disconnected
from shardwise.server.logprobs import CompletionLogprobs
from shardwise.server.planning import check_choices, grammar_of, in_thread, make_generation, output_limit
from shardwise.server.problems import Problem, invalid
from shardwise.server.prompts import token_prompts
from shardwise.server.routes.documents import ERRORS, ok
from shardwise.server.schemas.completions import CompletionRequest
from shardwise.server.state import ServerState, state_of
from shardwise.server.token_stream import GenerationStream
from shardwise.server.usage import usage
from shardwise.session.request import Token

router = APIRouter()


@router.post("/v1/completions", responses=ERRORS | ok("a text_completion, or chunks where `stream` is true", stream=True))
async def completions(request: Request, body: CompletionRequest, state: Annotated[ServerState, Depends(state_of)]) -> Response:
    """Continue a text."""
    model_name = state.check_model(body.model)
    engine = state.engine()
    num_choices = check_choices(body, state)
    if body.echo and body.logprobs is not None:
        raise invalid("echo with logprobs is not offered: prompt tokens have no log probabilities here", "echo")
    if body.max_tokens == 0:
        raise invalid("max_tokens must be at least 1", "max_tokens")
    prompts = await in_thread(lambda: _prompts(engine, body, state.settings.max_batch_prompts))
    generation = make_generation(
        request,
        state,
        body,
        prompts,
        max_tokens=[output_limit(engine, len(prompt), body.max_tokens, "prompt") for prompt in prompts],
        choices=num_choices,
        stop=body.stop_sequences(),
        grammar=grammar_of(body, ""),
        num_logprobs=-1 if body.logprobs is None else body.logprobs,
        endpoint="completions",
    )
    answer = CompletionAnswer(state, engine, body, prompts, generation, model_name)
    stream = GenerationStream(state, generation, answer, request.scope) if body.stream else None
    async with generation.unless_streaming() as keep:
        generation.start(stream.write_first if stream is not None else None)
        await unless_disconnected(request, generation.wait_first())
        if stream is not None:
            return keep(stream)
        return Response(await unless_disconnected(request, answer.whole()), media_type="application/json")


def _prompts(engine: Engine, body: CompletionRequest, most: int) -> list[list[int]]:
    prompts = token_prompts(engine, body.prompt, "prompt")
    if len(prompts) > most:
        raise invalid(f"at most {most} prompts are taken in one request", "prompt")
    return prompts


@dataclass(slots=True)
class _Choice:
    """One text as it grows."""

    index: int
    logprobs: CompletionLogprobs | None
    tokens: list[Token] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None

    def as_dict(self, text: str, tokens: list[Token], finish_reason: str | None) -> dict[str, Any]:
        logprobs = self.logprobs.add(tokens) if self.logprobs is not None else None
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class CompletionAnswer:
    """Both shapes of the answer."""

    def __init__(
        self,
        state: ServerState,
        engine: Engine,
        body: CompletionRequest,
        prompts: list[list[int]],
        generation: Generation,
        model_name: str,
    ) -> None:
        self._body = body
        self._generation = generation
        self._num_prompt = sum(len(prompt) for prompt in prompts)
        per_prompt = body.n or 1
        self._echo = [engine.tokenizer.decode(p) if body.echo else "" for p in prompts for _ in range(per_prompt)]
        top = body.logprobs
        self._choices = [
            _Choice(index, None if top is None else CompletionLogprobs(engine.tokenizer, top))
            for index in range(len(prompts) * per_prompt)
        ]
        self._num_generated = 0
        self._head: dict[str, Any] = {
            "id": f"cmpl-{generation.id}",
            "object": "text_completion",
            "created": int(state.clock.wall_s()),
            "model": model_name,
            "system_fingerprint": f"sw-{engine.model.revision_digest[:12]}",
        }

    async def whole(self) -> bytes:
        """The JSON of an answer that is not streamed."""
        while (item := await self._generation.next()) is not None:
            index, token, _ = item
            choice = self._choices[index]
            choice.texts.append(token.text)
            choice.tokens.append(token)
            choice.finish_reason = token.finish_reason or None
            self._num_generated += 1
        choices = [
            choice.as_dict(echo + "".join(choice.texts), choice.tokens, choice.finish_reason)
            for echo, choice in zip(self._echo, self._choices)
        ]
        return msgspec.json.encode(self._head | {"choices": choices, "usage": usage(self._num_prompt, self._num_generated)})

    def opening(self) -> bytes:
        """The prompts, where they are to be repeated."""
        if not self._body.echo:
            return b""
        return b"".join(self._event(c.as_dict(echo, [], None)) for echo, c in zip(self._echo, self._choices))

    def piece(self, choice: int, token: Token) -> bytes:
        """The chunk of one token."""
        self._num_generated += 1
        if token.text or token.finish_reason or self._body.logprobs is not None:
            return self._event(self._choices[choice].as_dict(token.text, [token], token.finish_reason or None))
        return b""

    def ending(self) -> bytes:
        """What follows the last token."""
        if not self._body.wants_usage:
            return sse.DONE
        return sse.data(self._head | {"choices": [], "usage": usage(self._num_prompt, self._num_generated)}) + sse.DONE

    def failed(self, problem: Problem) -> bytes:
        """A failure on the way is an event with an error."""
        return sse.data(problem.body)

    def _event(self, choice: dict[str, Any]) -> bytes:
        return sse.data(self._head | {"choices": [choice]} | ({"usage": None} if self._body.wants_usage else {}))
