"""The application: routes, error shapes, the dashboard's files, the door around it all.

`create_app(slot)` works before the deployment stands: until then everything that generates answers 503 with progress.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

import shardwise
from shardwise.clock import Clock, SystemClock
from shardwise.errors import ShardwiseError
from shardwise.server.access import ApiKey
from shardwise.server.door import Door
from shardwise.server.engine import EngineSlot
from shardwise.server.generation import ClientGone
from shardwise.server.problems import Problem, from_error, internal
from shardwise.server.routes import chat, completions, embeddings, health, live, models, operate, pages, responses, tokens
from shardwise.server.settings import ServerSettings, check_exposure
from shardwise.server.state import ServerState, request_id_of


def create_app(
    slot: EngineSlot, settings: ServerSettings | None = None, *, keys: tuple[ApiKey, ...] = (), clock: Clock | None = None
) -> FastAPI:
    """The ASGI application around one deployment; raises `UsageError` for an exposed server without a key."""
    settings = settings or ServerSettings()
    check_exposure(settings, has_keys=bool(keys))
    state = ServerState(slot, settings, clock or SystemClock())
    state.access.keys = keys

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.bridge()
        state.live.start()
        yield
        await state.live.stop()
        state.traces.close()

    app = FastAPI(
        title="shardwise",
        version=shardwise.__version__,
        lifespan=lifespan,
        docs_url=None,  # their pages load scripts from the internet
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
    )
    app.state.shardwise = state
    for module in (chat, completions, responses, embeddings, models, tokens, health, live, operate, pages):
        app.include_router(module.router)
    app.mount("/static", pages.static_files(), name="static")
    _add_error_shapes(app)
    app.add_middleware(Door, state=state)
    return app


def _add_error_shapes(app: FastAPI) -> None:
    @app.exception_handler(Problem)
    async def on_problem(_: Request, error: Problem) -> Response:
        return error.response()

    @app.exception_handler(ShardwiseError)
    async def on_error(_: Request, error: ShardwiseError) -> Response:
        return from_error(error).response()

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> Response:
        return validation_problem(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        answer = Problem(error.status_code, message, code="not_found" if error.status_code == 404 else None).response()
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(ClientGone)
    async def on_gone(request: Request, _: ClientGone) -> Response:
        state: ServerState = request.app.state.shardwise
        state.metrics.disconnects.inc()
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def on_defect(request: Request, _: Exception) -> Response:
        return internal(request_id_of(request)).response()  # starlette raises it again, for the log


def validation_problem(errors: Any) -> Problem:
    """The first complaints of the validation, with the field they are about."""
    texts = []
    for one in list(errors)[:3]:
        place = ".".join(str(part) for part in one["loc"] if part not in ("body", "query", "path"))
        texts.append(f"{place}: {one['msg']}" if place else one["msg"])
    first = [str(part) for part in errors[0]["loc"] if part != "body"] if errors else []
    unknown = bool(errors) and errors[0]["type"] == "extra_forbidden"
    return Problem(
        400,
        "; ".join(texts).encode("utf-8", "replace").decode()[:1000] or "the request is not valid",
        param=first[0] if first else None,
        code="unknown_parameter" if unknown else "invalid_value",
    )
