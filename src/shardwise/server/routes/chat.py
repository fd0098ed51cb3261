"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from shardwise.server import sse
from shardwise.server.chat_plan import ChatPlan, plan_chat
from shardwise.server.engine import Engine
from shardwise.server.generation import Generation, unless_disconnected
from shardwise.server.planning import check_choices, grammar_of, in_thread, make_generation, output_limit
from shardwise.server.problems import Problem, invalid
from shardwise.server.routes.documents import ERRORS, ok
from shardwise.server.schemas.chat import ChatRequest
from shardwise.server.state import ServerState, state_of
from shardwise.server.token_stream import GenerationStream
from shardwise.server.usage import usage
from shardwise.session.request import Token

router = APIRouter()


@router.post("/v1/chat/completions", responses=ERRORS | ok("a chat.completion, or chunks where `stream` is true", stream=True))
async def chat_completions(request: Request, body: ChatRequest, state: Annotated[ServerState, Depends(state_of)]) -> Response:
    """Answer a conversation."""
    model_name = state.check_model(body.model)
    engine = state.engine()
    num_choices = check_choices(body, state)
    num_top = _num_top(body)
    plan = await in_thread(lambda: plan_chat(engine, body, state.settings))
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    generation = make_generation(
        request,
        state,
        body,
        [plan.prompt],
        max_tokens=[output_limit(engine, len(plan.prompt), asked, "messages")],
        choices=num_choices,
        stop=body.stop_sequences(),
        grammar=grammar_of(body, plan.grammar),
        num_logprobs=num_top,
        endpoint="chat",
    )
    answer = ChatAnswer(state, engine, body, plan, generation, model_name, num_top)
    stream = GenerationStream(state, generation, answer, request.scope) if body.stream else None
    async with generation.unless_streaming() as keep:
        generation.start(stream.write_first if stream is not None else None)
        await unless_disconnected(request, generation.wait_first())
        if stream is not None:
            return keep(stream)
        return Response(await unless_disconnected(request, answer.whole()), media_type="application/json")


def _num_top(body: ChatRequest) -> int:
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else -1


class ChatAnswer:
    """Both shapes of the answer."""

    def __init__(
        self,
        state: ServerState,
        engine: Engine,
        body: ChatRequest,
        plan: ChatPlan,
        generation: Generation,
        model_name: str,
        num_top: int,
    ) -> None:
        self._body = body
        self._generation = generation
        self._num_prompt = len(plan.prompt)
        self._choices = [plan.choice(engine, index, num_top) for index in range(body.n or 1)]
        self._num_generated = 0
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{generation.id}",
            "created": int(state.clock.wall_s()),
            "model": model_name,
            "system_fingerprint": f"sw-{engine.model.revision_digest[:12]}",
        }

    async def whole(self) -> bytes:
        """The JSON of an answer that is not streamed."""
        while (item := await self._generation.next()) is not None:
            index, token, _ = item
            self._choices[index].feed(token)
            self._num_generated += 1
        return msgspec.json.encode(
            self._head
            | {
                "object": "chat.completion",
                "choices": [choice.message() for choice in self._choices],
                "usage": usage(self._num_prompt, self._num_generated),
            }
        )

    def opening(self) -> bytes:
        """The chunks that name the roles."""
        return b"".join(self._event(choice.opening()) for choice in self._choices)

    def piece(self, choice: int, token: Token) -> bytes:
        """The chunks of one token."""
        self._num_generated += 1
        return b"".join(self._event(one) for one in self._choices[choice].deltas(token))

    def ending(self) -> bytes:
        """What follows the last token."""
        if not self._body.wants_usage:
            return sse.DONE
        head = self._head | {"object": "chat.completion.chunk"}
        return sse.data(head | {"choices": [], "usage": usage(self._num_prompt, self._num_generated)}) + sse.DONE

    def failed(self, problem: Problem) -> bytes:
        """A failure on the way is an event with an error."""
        return sse.data(problem.body)

    def _event(self, choice: dict[str, Any]) -> bytes:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if self._body.wants_usage:
            chunk["usage"] = None
        return sse.data(chunk)
