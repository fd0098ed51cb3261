"""`POST /v1/responses`: text in, text or function calls out. Nothing is stored."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from shardwise.server.chat_plan import plan_chat
from shardwise.server.generation import Generation, unless_disconnected
from shardwise.server.planning import grammar_of, in_thread, make_generation, output_limit
from shardwise.server.responses_input import as_chat
from shardwise.server.responses_output import ResponseOutput, response_head
from shardwise.server.routes.documents import ERRORS, ok
from shardwise.server.schemas.responses import ResponseRequest
from shardwise.server.state import ServerState, state_of
from shardwise.server.token_stream import GenerationStream

router = APIRouter()


@router.post("/v1/responses", responses=ERRORS | ok("a response, or events where `stream` is true", stream=True))
async def responses(request: Request, body: ResponseRequest, state: Annotated[ServerState, Depends(state_of)]) -> Response:
    """Answer an input."""
    model_name = state.check_model(body.model)
    engine = state.engine()
    chat = as_chat(body)
    plan = await in_thread(lambda: plan_chat(engine, chat, state.settings))
    generation = make_generation(
        request,
        state,
        chat,
        [plan.prompt],
        max_tokens=[output_limit(engine, len(plan.prompt), body.max_output_tokens, "input")],
        grammar=grammar_of(chat, plan.grammar),
        endpoint="responses",
    )
    head = response_head(body, f"resp_{generation.id}", state.clock.wall_s(), model_name)
    output = ResponseOutput(head, plan.choice(engine, 0, -1), len(plan.prompt))
    stream = GenerationStream(state, generation, output, request.scope) if body.stream else None
    async with generation.unless_streaming() as keep:
        generation.start(stream.write_first if stream is not None else None)
        await unless_disconnected(request, generation.wait_first())
        if stream is not None:
            return keep(stream)
        await unless_disconnected(request, _collect(generation, output))
        return Response(msgspec.json.encode(output.as_dict(output.status)), media_type="application/json")


async def _collect(generation: Generation, output: ResponseOutput) -> None:
    while (item := await generation.next()) is not None:
        output.feed(item[1])
