"""`/health/live`: the process answers. `/health/ready`: a token really went through every stage lately. `/metrics`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from shardwise.server.engine import Availability
from shardwise.server.problems import unavailable
from shardwise.server.routes.documents import ok, only
from shardwise.server.state import ServerState, state_of

router = APIRouter()


@router.get("/health/live", responses=ok("the process answers"))
async def live() -> dict[str, str]:
    """Nothing is said about generation."""
    return {"status": "live"}


@router.get("/health/ready", responses=ok("a token went through every stage lately") | only(503))
@router.get("/health", include_in_schema=False)
async def ready(state: Annotated[ServerState, Depends(state_of)]) -> Response:
    """200 where generation works, 503 with the reason (and while loading progress and time left) where it does not."""
    said = state.slot.availability()  # not in a thread: those may all be busy
    headers = {} if said.ready else unavailable(said.reason, said.status, said.expected_s).headers
    return Response(
        msgspec.json.encode(availability_dict(said) | ({} if said.ready else _error(said))),
        status_code=200 if said.ready else 503,
        headers=headers | {"Cache-Control": "no-store"},
        media_type="application/json",
    )


def availability_dict(said: Availability) -> dict[str, Any]:
    """As JSON; the live view uses it as well."""
    return {
        "status": said.status,
        "reason": said.reason,
        "last_token_age_s": said.last_token_age_s,
        "progress": said.progress,
        "expected_s": said.expected_s,
    }


def _error(said: Availability) -> dict[str, Any]:
    return unavailable(said.reason, said.status, said.expected_s, said.progress).body


@router.get("/metrics", responses=ok("Prometheus exposition", media_type="text/plain"))
async def metrics(state: Annotated[ServerState, Depends(state_of)]) -> Response:
    """Figures for Prometheus."""
    return Response(await state.metrics.scrape(), headers={"Content-Type": CONTENT_TYPE_LATEST})
