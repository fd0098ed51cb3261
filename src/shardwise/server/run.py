"""`shardwise serve`: HTTP first, then the model; a drained end.

The server answers from the first moment: 503 with progress while the deployment is launched in a thread. A launch that fails ends
the server with that error. On SIGINT or SIGTERM nothing new is accepted, running answers are finished for up to `drain_s`, then
the deployment is closed. A second signal ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import uvicorn

from shardwise.clock import Clock, SystemClock
from shardwise.errors import RemoteFailure, ShardwiseError, UsageError
from shardwise.server.access import ApiKey
from shardwise.server.app import create_app
from shardwise.server.engine import Engine, EngineSlot, LoadingProgress
from shardwise.server.operations import Operator, Relaunch
from shardwise.server.protocol import GuardedProtocol
from shardwise.server.settings import ServerSettings
from shardwise.server.state import ServerState
from shardwise.transport.promptness import prefer_promptness

log = logging.getLogger("shardwise.server")

SWITCH_INTERVAL_S = 0.0005
_BACKLOG = 2048
_LAST_WORDS_S = 2.0

OnProgress = Callable[[str, float], None]


class Loading:
    """How far a launch is. The time that is left is extrapolated from the share that is done, once there is one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._step, self._share = "starting", 0.0
        self._step_started_s = clock.now_s()

    def on_progress(self, what: str, share: float) -> None:
        """Called by the launch, from its thread."""
        if what != self._step:
            self._step_started_s = self._clock.now_s()
        self._step, self._share = what, min(1.0, max(0.0, share))

    def __call__(self) -> LoadingProgress:
        passed_s = self._clock.now_s() - self._step_started_s
        left_s = passed_s * (1.0 - self._share) / self._share if 0.02 < self._share < 1.0 else None
        return LoadingProgress(self._share, left_s, f"the model is not loaded yet ({self._step})")


class Server(uvicorn.Server):
    """Uvicorn, with a drain in front of its shutdown and an end when the launch fails."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve; threads hand the interpreter over ten times as often meanwhile, or the driver's bursts hold the loop up."""
        prefer_promptness()
        set_aside()
        before_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            super().run(sockets=sockets)
        finally:
            sys.setswitchinterval(before_s)
            gc.unfreeze()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; after a second signal, too, who waits is told so, and the application ends in order."""
        await super().shutdown(sockets)
        if self.force_exit:
            running = set(self.server_state.tasks)
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running, timeout=_LAST_WORDS_S)
            await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal that was handled is not raised again: the workers are still to be ended in order."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: object) -> None:
        """The first signal begins the drain, the second ends at once."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self._state.slot.drain()
        self._state.live.end_streams()


def set_aside() -> None:
    """What is there now stays: looking through all of it for garbage stopped every stream for 70-280 ms now and then."""
    gc.collect()
    gc.freeze()


def listen(settings: ServerSettings) -> socket.socket:
    """A socket that listens, so that a port that is taken is an error before anything is loaded, and that who connects from the
    first moment on is answered once the server runs. Port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, or asyncio leaves Nagle's algorithm on
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((settings.host.strip("[]"), settings.port))
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise UsageError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}",
            where="shardwise serve",
            hint="choose another --port, or 0 for a free one",
        ) from error
    return bound


def serve_forever(
    launch: Relaunch,
    settings: ServerSettings,
    *,
    keys: tuple[ApiKey, ...] = (),
    on_listening: Callable[[str], None] = lambda url: None,
    on_ready: Callable[[EngineSlot, Engine], None] = lambda slot, engine: None,
) -> None:
    """Serve until a signal; raises what the launch raised. `launch(layers, on_progress)` makes the deployment and blocks."""
    loading = Loading(SystemClock())
    slot = EngineSlot(loading=loading)
    app = create_app(slot, settings, keys=keys)
    state: ServerState = app.state.shardwise
    state.operator = Operator(slot, launch, drain_s=settings.drain_s, note=state.live.note)
    state.live.operations = state.operator.allowed
    bound = listen(settings)
    config = uvicorn.Config(
        app,
        http=GuardedProtocol,
        ws="none",  # nothing here speaks it
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
        timeout_keep_alive=30,
    )
    server = Server(config, state)
    launching = threading.Thread(target=_launch, args=(launch, loading, slot, server, on_ready), name="launch", daemon=True)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    on_listening(f"http://{host}:{bound.getsockname()[1]}")
    launching.start()
    try:
        server.run(sockets=[bound])
    finally:
        slot.drain()
        bound.close()
        launching.join(timeout=settings.drain_s)
        if slot.engine is not None:
            slot.engine.close()
    if slot.failure is not None:
        raise slot.failure


def _launch(
    launch: Relaunch, loading: Loading, slot: EngineSlot, server: uvicorn.Server, on_ready: Callable[[EngineSlot, Engine], None]
) -> None:
    engine: Engine | None = None
    failure: ShardwiseError = RemoteFailure("the launch broke; the log has the reason", where="shardwise serve")
    try:
        engine = launch((), loading.on_progress)
    except ShardwiseError as error:
        failure = error
    finally:  # a defect as well must not leave a server that says "loading" for ever
        if engine is None:
            slot.fail(failure)
            server.should_exit = True
    if engine is None:
        return
    set_aside()
    slot.fill(engine)
    if not slot.draining:
        on_ready(slot, engine)
