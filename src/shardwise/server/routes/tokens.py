"""`POST /tokenize`, `POST /detokenize`: the model's own tokenizer, with the field names of llama.cpp's and vLLM's servers."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from shardwise.errors import ShardwiseError
from shardwise.server.engine import Engine
from shardwise.server.figures import context_tokens
from shardwise.server.problems import from_error, invalid
from shardwise.server.prompts import encode_bounded, render_chat
from shardwise.server.routes.documents import ERRORS
from shardwise.server.schemas.small import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from shardwise.server.state import ServerState, state_of
from shardwise.server.toolcalls import format_of_template

router = APIRouter()
_MOST_COUNTED = 32768  # tokens of a text that is only counted, where the context is smaller


@router.post("/tokenize", responses=ERRORS)
def tokenize(body: TokenizeRequest, state: Annotated[ServerState, Depends(state_of)]) -> TokenizeAnswer:
    """Text or messages to token ids."""
    engine = state.loaded()
    if body.model is not None:
        state.check_model(body.model)
    ids = _encode(engine, body)
    pieces = [engine.tokenizer.token_bytes(i).decode(errors="replace") for i in ids] if body.with_pieces else None
    return TokenizeAnswer(tokens=ids, count=len(ids), max_model_len=context_tokens(engine), pieces=pieces)


@router.post("/detokenize", responses=ERRORS)
def detokenize(body: DetokenizeRequest, state: Annotated[ServerState, Depends(state_of)]) -> DetokenizeAnswer:
    """Token ids to text."""
    engine = state.loaded()
    if body.model is not None:
        state.check_model(body.model)
    if body.tokens and max(body.tokens) >= engine.model.vocab_size:
        raise invalid(f"token id {max(body.tokens)} is not below the vocabulary's {engine.model.vocab_size}", "tokens")
    text = engine.tokenizer.decode(body.tokens)
    return DetokenizeAnswer(content=text, prompt=text)


def _encode(engine: Engine, body: TokenizeRequest) -> list[int]:
    try:
        if body.messages is not None:
            return render_chat(engine, body.messages, [], format_of_template(engine.model.tokenizer.chat_template))
        text = body.content if body.content is not None else body.prompt or ""
        return encode_bounded(
            engine, text, at_least=_MOST_COUNTED, add_special=body.add_special, parse_special=body.parse_special
        )
    except ShardwiseError as error:
        raise from_error(error) from error
