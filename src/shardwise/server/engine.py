"""What the server needs of a deployment, as protocols, and the slot in which one stands.

Token events flow in from the deployment's driver thread; requests flow out. The server is written against these
protocols only. `EngineSlot` is what the HTTP side asks: is there a deployment, is it ready, how long will it take. It
never claims readiness itself: `ready` is the deployment's own word that a token went through every stage lately.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shardwise.errors import ShardwiseError
from shardwise.model.description import ModelDescription
from shardwise.planner.types import Advice, Prediction
from shardwise.session.request import GenerationRequest, Readiness, Recovery, Token
from shardwise.session.text import Tokenizer as Tokenizer
from shardwise.transport.messages import Stats

Event = Token | ShardwiseError


class SessionHandle(Protocol):
    """A request in flight."""

    def cancel(self) -> None:
        """Free its KV on every stage; harmless when it has ended."""
        ...


class StageLike(Protocol):
    """One stage as it runs."""

    @property
    def index(self) -> int: ...
    @property
    def node(self) -> str: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def layers(self) -> tuple[int, int]: ...
    @property
    def state(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...


class NoteLike(Protocol):
    """Something that a deployment has to say; kind is good | bad | info."""

    @property
    def kind(self) -> str: ...
    @property
    def text(self) -> str: ...


@runtime_checkable
class OnMachines(Protocol):
    """A deployment that knows its machines and tells what happens to them."""

    @property
    def notes(self) -> Sequence[NoteLike]: ...
    @property
    def capacities(self) -> dict[str, int]: ...


class Engine(Protocol):
    """A deployment, as far as the server is concerned.

    Promises: after `submit` the callback gets tokens in order and exactly one last event (a token with a
    `finish_reason` or an error), from a thread of the deployment; a cancelled session gets its last event too.
    Fails when: `submit` raises `QueueFull`, `ContextFull` or `UsageError` at once, or delivers them as the event.
    Called by: the routes, the live view, metrics.
    """

    @property
    def model(self) -> ModelDescription: ...
    @property
    def stages(self) -> Sequence[StageLike]: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def recoveries(self) -> Sequence[Recovery]: ...

    def submit(self, request: GenerationRequest, on_event: Callable[[Event], None]) -> SessionHandle: ...
    def readiness(self) -> Readiness: ...
    def stats(self) -> Sequence[Stats]: ...
    def close(self, drain_s: float = 0.0) -> None: ...


@runtime_checkable
class EmbeddingEngine(Protocol):
    """A deployment whose model gives embeddings."""

    def embed(self, tokens: Sequence[int]) -> list[float]: ...


@dataclass(frozen=True, slots=True)
class Availability:
    """The slot's answer. `status` is ready | loading | not_ready | failed | draining | stopped."""

    status: str
    reason: str
    last_token_age_s: float | None = None
    progress: float | None = None
    expected_s: float | None = None

    @property
    def ready(self) -> bool:
        return self.status == "ready"


@dataclass(frozen=True, slots=True)
class LoadingProgress:
    """How far a launch is: 0..1, and the seconds that are left where they are known."""

    fraction: float | None
    expected_s: float | None
    step: str = "loading"


@dataclass(frozen=True, slots=True)
class Expectation:
    """What was said of the deployment before it ran: by its plan, or by a prediction from measured rates."""

    prediction: Prediction | None = None
    advice: Advice | None = None


class EngineSlot:
    """Where the deployment stands, before, while and after it runs. Thread-safe."""

    def __init__(self, engine: Engine | None = None, *, loading: Callable[[], LoadingProgress] | None = None) -> None:
        self._lock = threading.Lock()
        self._engine = engine
        self._loading = loading
        self._failure: ShardwiseError | None = None
        self._draining = False
        self._stopped = False
        self._progress = LoadingProgress(None, None)
        self.expectation = Expectation()

    @property
    def engine(self) -> Engine | None:
        return self._engine

    @property
    def failure(self) -> ShardwiseError | None:
        return self._failure

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def stopped(self) -> bool:
        """Nothing runs, and nothing is being launched."""
        return self._stopped or self._failure is not None

    def fill(self, engine: Engine) -> None:
        """The launch has succeeded."""
        with self._lock:
            self._engine, self._draining = engine, False

    def begin(self) -> None:
        """A launch begins."""
        with self._lock:
            self._failure, self._stopped, self._draining = None, False, False
            self._loading = lambda: self._progress

    def on_progress(self, what: str, share: float) -> None:
        """How far that launch is."""
        self._progress = LoadingProgress(share, None, f"the model is being loaded again ({what})")

    def empty(self) -> None:
        """The deployment was closed on purpose."""
        with self._lock:
            self._engine, self._stopped, self._draining = None, True, False

    def resume(self) -> None:
        """End a drain."""
        with self._lock:
            self._draining = False

    def fail(self, error: ShardwiseError) -> None:
        """The launch has failed for good."""
        with self._lock:
            self._failure = error

    def drain(self) -> None:
        """Accept nothing new from now on."""
        with self._lock:
            self._draining = True

    def availability(self) -> Availability:
        """The truth of this moment; asks the deployment itself."""
        if self._failure is not None:
            return Availability("failed", self._failure.one_line())
        if self._draining:
            return Availability("draining", "the server is shutting down and finishes what it has begun")
        if self._engine is None and self._stopped:
            return Availability("stopped", "the model was stopped by its operator")
        if self._engine is None:
            progress = self._loading() if self._loading is not None else LoadingProgress(None, None)
            return Availability("loading", progress.step, progress=progress.fraction, expected_s=progress.expected_s)
        said = self._engine.readiness()
        loading = not said.ready and said.loading_progress is not None and said.loading_progress < 1.0
        status = "ready" if said.ready else "loading" if loading else "not_ready"
        return Availability(status, said.reason, said.last_token_age_s, said.loading_progress, said.expected_s)
