"""`POST /v1/embeddings`, for deployments whose model gives embeddings. Others are refused: a pooled last hidden state of a
text model would look like an embedding and rank like noise."""

from __future__ import annotations

import base64
import struct
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from shardwise.server.engine import EmbeddingEngine
from shardwise.server.planning import in_thread
from shardwise.server.problems import impossible
from shardwise.server.prompts import token_prompts
from shardwise.server.routes.documents import ERRORS, ok
from shardwise.server.schemas.small import EmbeddingRequest
from shardwise.server.state import ServerState, state_of

router = APIRouter()


@router.post("/v1/embeddings", responses=ERRORS | ok("a list of embeddings"))
async def embeddings(body: EmbeddingRequest, state: Annotated[ServerState, Depends(state_of)]) -> dict[str, Any]:
    """Vectors for texts."""
    name = state.check_model(body.model)
    engine = state.engine()
    if not isinstance(engine, EmbeddingEngine):
        raise impossible(
            f"'{name}' generates text and was not trained to give embeddings; serve an embedding model for this",
            "model",
            "no_embeddings",
        )
    if body.dimensions is not None:
        raise impossible("the size of the embeddings cannot be chosen", "dimensions")
    prompts = await in_thread(lambda: token_prompts(engine, body.input, "input"))
    vectors = await in_thread(lambda: [engine.embed(prompt) for prompt in prompts])
    count = sum(len(prompt) for prompt in prompts)
    return {
        "object": "list",
        "model": name,
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


def _encoded(vector: list[float], form: str | None) -> list[float] | str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if form == "base64" else vector
