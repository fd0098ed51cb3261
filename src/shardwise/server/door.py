"""The outermost layer: every request passes here before anything else sees it.

In order: request id, Host and Origin, CORS preflight, API key, rate limit, bounded and strict JSON body. Then the application.
One line of log a request (id, client, method, path, status, seconds, bytes): never a body, a query or a prompt.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardwise.server.body import check_json, read_body, replay
from shardwise.server.origin import check_host, check_origin, preflight_headers
from shardwise.server.problems import Problem, cut_short
from shardwise.server.state import ServerState

log = logging.getLogger("shardwise.server.access")

_GUARDED = ("/v1/", "/api/", "/tokenize", "/detokenize", "/metrics")
_LIMITED = ("/v1/", "/tokenize", "/detokenize")
_REQUEST_ID = re.compile(r"^[A-Za-z0-9_.-]{1,64}$")
_SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
    ),
}


@dataclass(slots=True)
class _Answer:
    """What has been sent so far."""

    request_id: str
    extra: dict[str, str] = field(default_factory=dict)
    status: int = 0
    num_bytes: int = 0


class Door:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        answer = _Answer(given if _REQUEST_ID.match(given) else f"req_{secrets.token_hex(12)}")
        scope["shardwise.request_id"] = answer.request_id
        started_s = self._state.clock.now_s()

        def mark(message: Message) -> None:
            out = MutableHeaders(scope=message)
            marks = answer.extra | self._fallback() | {"X-Request-Id": answer.request_id}
            for name, value in (_SECURITY_HEADERS | marks).items():
                out[name] = value

        scope["shardwise.mark"] = mark

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                mark(message)
            else:
                answer.num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            early = await self._enter(scope, headers, answer)
            if early is None:
                receive = await self._read(scope, receive)
                await self._app(scope, receive, send_marked)
            else:
                await early(scope, receive, send_marked)
        except Problem as problem:
            await problem.response()(scope, receive, send_marked)
        except asyncio.CancelledError:  # the server ends, and the drain was too short for this one
            if not answer.status:
                await cut_short().response()(scope, receive, send_marked)
        finally:
            self._record(scope, answer, self._state.clock.now_s() - started_s)

    def _fallback(self) -> dict[str, str]:
        """Says so where another model answers, because the split one was lost."""
        model = getattr(self._state.slot.engine, "degraded", "")
        return {"X-Shardwise-Fallback": model} if model else {}

    async def _enter(self, scope: Scope, headers: Headers, answer: _Answer) -> Response | None:
        """Everything that can be decided from the headers; an answer where there is nothing more to do."""
        settings, path = self._state.settings, scope["path"]
        scope["shardwise.client"] = self._state.access.identify("") if not self._state.access.keys else None
        host, origin = headers.get("host", ""), headers.get("origin", "")
        check_host(host, settings)
        answer.extra = check_origin(origin, host, settings)
        if scope["method"] == "OPTIONS" and origin and "access-control-request-method" in headers:
            if origin not in settings.cors_origins:
                raise Problem(403, "this origin is not allowed", code="foreign_origin")
            return Response(status_code=204, headers=preflight_headers(origin))
        if path.startswith(_GUARDED):
            client = self._state.access.identify(headers.get("authorization", ""))
            scope["shardwise.client"] = client
            if scope["method"] == "POST" and path.startswith(_LIMITED):
                answer.extra |= self._state.access.admit(client)
        return None

    async def _read(self, scope: Scope, receive: Receive) -> Receive:
        """The body, for the methods that have one."""
        if scope["method"] not in ("POST", "PUT", "PATCH", "DELETE"):
            return receive
        settings = self._state.settings
        body = await read_body(scope, receive, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)
        if scope["method"] == "POST" and (body or not scope["path"].startswith("/api/")):
            check_json(scope, body)
        return replay(body, receive)

    def _record(self, scope: Scope, answer: _Answer, duration_s: float) -> None:
        path, status = scope["path"], answer.status or 499
        client = scope.get("shardwise.client")
        route = scope.get("route")
        endpoint = getattr(route, "path", "other") if route is not None else "other"
        self._state.metrics.requests.labels(endpoint, str(status)).inc()
        log.info(
            "%s client=%s %s %s status=%d duration_s=%.3f bytes=%d",
            answer.request_id,
            client.name if client is not None else "-",
            scope["method"],
            path[:200].encode("unicode_escape").decode(),
            status,
            duration_s,
            answer.num_bytes + getattr(scope.get("shardwise.line"), "num_bytes", 0),
        )
