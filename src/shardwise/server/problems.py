"""Every refusal and failure in OpenAI's error shape, with the status that clients act upon.

    {"error": {"message", "type", "param", "code"}}        and Retry-After where waiting helps

A `Problem` is raised by the routes; a `ShardwiseError` that comes out of the deployment is mapped by `from_error`.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.responses import Response

from shardwise.errors import (
    ContextFull,
    NetworkError,
    QueueFull,
    SessionLost,
    ShardwiseError,
    StageError,
    UnsupportedModelError,
    UsageError,
)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class Problem(Exception):
    """A request that ends with an error status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.details = details or {}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = _TYPES.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error | self.details}

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}

    def response(self) -> Response:
        """The answer as a whole."""
        return Response(
            msgspec.json.encode(self.body), status_code=self.status, headers=self.headers, media_type="application/json"
        )


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> Problem:
    """400: the request is wrong in itself."""
    return Problem(400, message, param=param, code=code)


def impossible(message: str, param: str | None = None, code: str = "unsupported_value") -> Problem:
    """422: understood, but this model or deployment cannot do it."""
    return Problem(422, message, param=param, code=code)


def unavailable(reason: str, status: str, expected_s: float | None, progress: float | None = None) -> Problem:
    """503 with the reason and, where known, the time that is left."""
    known = "" if expected_s is None else f"; about {max(1, math.ceil(expected_s))} s left"
    return Problem(
        503,
        f"generation is not available: {reason}{known}",
        code=status,
        retry_after_s=5.0 if expected_s is None else min(expected_s, 600.0),
        details={"expected_s": expected_s, "progress": progress},
    )


def cut_short() -> Problem:
    """503: the server ended before the answer was whole."""
    return Problem(503, "the server was ended before the answer was whole; ask again", code="server_ended", retry_after_s=5.0)


def from_error(error: ShardwiseError) -> Problem:
    """A failure of the deployment as the client should see it."""
    message = error.one_line()
    if isinstance(error, ContextFull):
        return Problem(400, message, param="messages", code="context_length_exceeded")
    if isinstance(error, QueueFull):
        return Problem(429, message, code="queue_full", retry_after_s=float(error.details.get("retry_after_s", 2.0)))
    if isinstance(error, UnsupportedModelError):
        return impossible(message)
    if isinstance(error, UsageError):
        return invalid(message, error.details.get("field") or None)
    if isinstance(error, SessionLost | StageError | NetworkError):
        return Problem(503, message, code=type(error).__name__, retry_after_s=5.0)
    return Problem(500, message, code=type(error).__name__)


def internal(request_id: str) -> Problem:
    """500: a defect of ours. The log has the rest under this id."""
    return Problem(500, f"internal error; the server's log tells more under request id {request_id}", code="internal_error")
