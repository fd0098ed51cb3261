"""What OpenAPI says about answers."""

from __future__ import annotations

from typing import Any

from shardwise.server.schemas.common import ErrorBody

_MEANINGS = {
    400: "The request is wrong; `param` names the field",
    401: "No or an unknown API key",
    403: "A foreign web page or host name",
    404: "No such model",
    408: "The body came too slowly",
    413: "The body is too large",
    415: "Not JSON",
    422: "Understood, but this model cannot do it",
    429: "Rate limit or full queue; see Retry-After",
    503: "Generation is not available; reason and expected time are given",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "model": ErrorBody} for status, text in _MEANINGS.items()
}


def ok(description: str, *, stream: bool = False, media_type: str = "application/json") -> dict[int | str, dict[str, Any]]:
    """The 200 of an endpoint."""
    content: dict[str, Any] = {
        media_type: {"schema": {"type": "object"} if media_type == "application/json" else {"type": "string"}}
    }
    if stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {200: {"description": description, "content": content}}


def only(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Some of the errors."""
    return {status: ERRORS[status] for status in statuses}
