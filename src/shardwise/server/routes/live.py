"""What the dashboard and `top` read: `/api/status` once, `/api/events` as it changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from shardwise.server import sse
from shardwise.server.routes.documents import ok, only
from shardwise.server.state import ServerState, state_of

router = APIRouter()


@router.get("/api/status", responses=ok("the picture of this moment") | only(401, 403))
async def status(state: Annotated[ServerState, Depends(state_of)]) -> dict[str, Any]:
    """Nodes, stages, boundaries, requests, advice, events."""
    return await state.live.picture()


@router.get("/api/events", responses=ok("pictures, one an event", media_type="text/event-stream") | only(401, 403))
async def events(state: Annotated[ServerState, Depends(state_of)]) -> Response:
    """A picture at once and then two a second."""
    return sse.EventStream(_pictures(state), keepalive_s=state.settings.keepalive_s)


async def _pictures(state: ServerState) -> AsyncIterator[bytes]:
    pictures = state.live.pictures()
    try:
        async for picture in pictures:
            yield picture
    finally:
        await pictures.aclose()  # type: ignore[attr-defined]
