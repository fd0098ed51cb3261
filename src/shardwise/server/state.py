"""What the routes share: one object a server, put on the application's state."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import PurePath

from starlette.requests import Request

from shardwise.clock import Clock, SystemClock
from shardwise.server.access import Access, Client
from shardwise.server.activity import Activity
from shardwise.server.bridge import Bridge
from shardwise.server.engine import Engine, EngineSlot
from shardwise.server.live import LiveView
from shardwise.server.metrics import Metrics
from shardwise.server.operations import Operator
from shardwise.server.problems import Problem, unavailable
from shardwise.server.settings import ServerSettings
from shardwise.server.tracing import Traces


@dataclass(slots=True)
class ServerState:
    """Settings, the deployment's slot, and what is counted."""

    slot: EngineSlot
    settings: ServerSettings = field(default_factory=ServerSettings)
    clock: Clock = field(default_factory=SystemClock)
    access: Access = field(init=False)
    activity: Activity = field(init=False)
    metrics: Metrics = field(init=False)
    traces: Traces = field(init=False)
    live: LiveView = field(init=False)
    started_s: float = field(init=False)
    operator: Operator | None = None
    _bridge: Bridge | None = None

    def __post_init__(self) -> None:
        self.access = Access(self.clock)
        self.activity = Activity(self.clock)
        self.metrics = Metrics()
        self.metrics.watch(self.slot, self.activity)
        self.traces = Traces(self.clock, self.settings.trace_endpoint)
        self.live = LiveView(self.slot, self.activity, self.traces, self.clock)
        self.started_s = self.clock.wall_s()

    def bridge(self) -> Bridge:
        """The way from driver threads into the running loop."""
        if self._bridge is None:
            self._bridge = Bridge(asyncio.get_running_loop(), self.clock)
        return self._bridge

    def engine(self) -> Engine:
        """The deployment, where it can generate; otherwise 503 with reason and expected time."""
        said = self.slot.availability()
        engine = self.slot.engine
        if engine is None or not said.ready:
            raise unavailable(said.reason, said.status, said.expected_s, said.progress)
        return engine

    def loaded(self) -> Engine:
        """The deployment for questions that need no generation (names, tokens)."""
        engine = self.slot.engine
        if engine is None:
            said = self.slot.availability()
            raise unavailable(said.reason, said.status, said.expected_s, said.progress)
        return engine

    def model_names(self) -> tuple[str, ...]:
        """Every name under which the model answers: the given ones, its own, and its file's. Never a path."""
        model = self.loaded().model
        file_name = PurePath(model.source.reference).name
        names = (*self.settings.alias, model.name, file_name.removesuffix(".gguf"))
        return tuple(dict.fromkeys(name for name in names if name))

    def check_model(self, name: str) -> str:
        """The name to answer with, or 404."""
        names = self.model_names()
        if name not in names:
            known = ", ".join(f"'{one}'" for one in names)
            raise Problem(
                404, f"the model '{name[:80]}' does not exist here; there is {known}", param="model", code="model_not_found"
            )
        return name


def state_of(request: Request) -> ServerState:
    """The server's state, as a dependency."""
    state = request.app.state.shardwise
    assert isinstance(state, ServerState)
    return state


def client_of(request: Request) -> Client:
    """Who asks; the door has put it there."""
    client = request.scope["shardwise.client"]
    assert isinstance(client, Client)
    return client


def request_id_of(request: Request) -> str:
    """The request's id, as in the answer's header and the log."""
    return str(request.scope["shardwise.request_id"])
