"""A real server on a real port, in a thread of the test process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import uvicorn
from fastapi import FastAPI

from shardwise.clock import SystemClock
from shardwise.server.app import create_app
from shardwise.server.engine import Engine, EngineSlot
from shardwise.server.protocol import GuardedProtocol
from shardwise.server.run import Server, listen
from shardwise.server.settings import ServerSettings
from shardwise.server.state import ServerState

CLOCK = SystemClock()


@dataclass
class Running:
    """Where it answers."""

    url: str
    app: FastAPI
    slot: EngineSlot
    http: httpx.Client

    @property
    def state(self) -> ServerState:
        state = self.app.state.shardwise
        assert isinstance(state, ServerState)
        return state

    def chat(self, text: str = "Say hi", **fields: object) -> httpx.Response:
        body = {"model": "sample", "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
        return self.http.post("/v1/chat/completions", json=body | fields)


@contextmanager
def running_app(app: FastAPI, slot: EngineSlot, settings: ServerSettings) -> Iterator[Running]:
    """Serve an application until the block ends."""
    bound = listen(settings)
    config = uvicorn.Config(
        app, http=GuardedProtocol, ws="none", log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=5
    )
    server = Server(config, app.state.shardwise)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    try:
        with httpx.Client(base_url=url, timeout=60) as http:
            wait_until(lambda: server.started, 10, "the server to start")
            yield Running(url, app, slot, http)
    finally:
        app.state.shardwise.live.end_streams()
        server.should_exit = True
        thread.join(timeout=20)
        bound.close()
        assert not thread.is_alive()


@contextmanager
def running_server(
    engine: Engine | None = None, *, slot: EngineSlot | None = None, keys: object = (), **settings: object
) -> Iterator[Running]:
    """Serve a deployment."""
    slot = slot or EngineSlot(engine)
    chosen = ServerSettings(**({"port": 0, "alias": ("sample",)} | settings))  # type: ignore[arg-type]
    app = create_app(slot, chosen, keys=keys)  # type: ignore[arg-type]
    with running_app(app, slot, chosen) as running:
        yield running


def wait_until(condition: object, timeout_s: float, what: str, *, step_s: float = 0.02) -> float:
    """Poll with a deadline; returns the seconds it took."""
    started_s = CLOCK.now_s()
    while not condition():  # type: ignore[operator]
        assert CLOCK.now_s() - started_s < timeout_s, f"waited {timeout_s} s for {what}"
        CLOCK.sleep(step_s)
    return CLOCK.now_s() - started_s
