"""`GET /v1/models`: the one model that runs, under every name it answers to."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from shardwise.server.figures import context_tokens
from shardwise.server.routes.documents import ERRORS, ok
from shardwise.server.state import ServerState, state_of

router = APIRouter()


def _card(state: ServerState, name: str) -> dict[str, Any]:
    model = state.loaded().model
    return {
        "id": name,
        "object": "model",
        "created": int(state.started_s),
        "owned_by": "shardwise",
        "context_length": context_tokens(state.loaded()),
        "quantization": model.quantization,
        "architecture": model.architecture,
        "revision_digest": model.revision_digest,
        "tokenizer_digest": model.tokenizer.digest,
        "num_layers": model.num_layers,
        "num_params": model.num_params,
    }


@router.get("/v1/models", responses=ERRORS | ok("the models"))
def models(state: Annotated[ServerState, Depends(state_of)]) -> dict[str, Any]:
    """What can be asked for."""
    return {"object": "list", "data": [_card(state, name) for name in state.model_names()]}


@router.get("/v1/models/{model_id:path}", responses=ERRORS | ok("the model"))
def model(model_id: str, state: Annotated[ServerState, Depends(state_of)]) -> dict[str, Any]:
    """One of them."""
    return _card(state, state.check_model(model_id))
