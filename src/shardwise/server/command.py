"""What `shardwise serve` does with its flags: keys, settings, and the launch; then `serve_forever`."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from shardwise.errors import UsageError
from shardwise.planner.plan_file import load_plan
from shardwise.planner.types import Prediction
from shardwise.records import replace
from shardwise.server.access import ApiKey, new_key, read_keys
from shardwise.server.engine import Engine, EngineSlot, Expectation
from shardwise.server.operations import Relaunch
from shardwise.server.run import serve_forever
from shardwise.server.settings import ServerSettings

if TYPE_CHECKING:
    from shardwise.deploy.deployment import Deployment
    from shardwise.deploy.options import RunOptions
    from shardwise.session.request import Recovery

log = logging.getLogger("shardwise.server")

_LOOK_EVERY_S = 0.5
_POLLED = ("/api/status", "/health", "/metrics")  # asked every second or so by programs, not by people


def make_key(path: Path | None, name: str, *, requests_per_minute: int, tokens_per_minute: int) -> str:
    """A new API key in the key file; the text is shown once."""
    if path is None:
        raise UsageError("--new-api-key needs a file to keep its hash in", where="serve", hint="add --api-key-file FILE")
    return new_key(path, name, requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute)


def read_key_file(path: Path | None) -> tuple[ApiKey, ...]:
    """The keys, or none; a file that was named must hold at least one."""
    if path is None:
        return ()
    keys = read_keys(path)
    if not keys:
        raise UsageError("the key file holds no key", where=str(path), hint="make one with --new-api-key NAME")
    return keys


def model_aliases(model: str, given: list[str]) -> tuple[str, ...]:
    """Names under which the model answers: the given ones first, then what was typed, without folders."""
    return tuple(dict.fromkeys([*given, PurePath(model).name.removesuffix(".gguf")]))


def require_runnable(model: str, options: RunOptions) -> None:
    """A model that is not there, or cannot be run like this, is an error before anything listens. What lies elsewhere (`hf:`) is
    looked at by the launch, which may download it."""
    from shardwise.model import describe_model, resolve_model

    if not model.startswith("hf:"):
        description = describe_model(resolve_model(model))
        options.settled_for(description).check(description)


def local_launch(model: str, options: RunOptions, equip: Callable[[Deployment], None] = lambda deployment: None) -> Relaunch:
    """Launches the model as stage processes here or on the cluster; another split may be asked for later."""

    def launch_it(layers: tuple[int, ...], on_progress: Callable[[str, float], None]) -> Engine:
        from shardwise.deploy.launcher import launch

        chosen = replace(options, layers=layers, num_stages=len(layers)) if layers else options
        deployment = launch(model, chosen, on_progress=on_progress)
        equip(deployment)
        return deployment

    return launch_it


def planned(plan: Path | None) -> Expectation | None:
    """What the plan promised."""
    if plan is None:
        return None
    found = load_plan(plan)
    return Expectation(found.predicted, found.advice)


def predicted(document: dict[str, Any] | None) -> Expectation:
    """A prediction in the JSON of `run`."""
    return Expectation(None if document is None else msgspec.convert(document, Prediction))


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever standard error is at that moment. One that is gone disturbs no request."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """All but polling that went well; with `-v` that too."""
    if record.name != "shardwise.server.access" or not isinstance(record.args, tuple) or len(record.args) < 5:
        return True
    method, path, status = record.args[2:5]
    polling = method == "GET" and str(path).startswith(_POLLED) and status not in (401, 403)
    return not polling or logging.getLogger().isEnabledFor(logging.DEBUG)


def log_to_stderr() -> None:
    """Requests and what happens, a line each. Harmless when it is asked for again."""
    logger = logging.getLogger("shardwise.server")
    if not any(isinstance(handler, StderrHandler) for handler in logger.handlers):
        handler = StderrHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        handler.addFilter(_is_worth_a_line)
        logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)


def serve_command(
    launch: Relaunch,
    settings: ServerSettings,
    *,
    keys: tuple[ApiKey, ...],
    say: Callable[[str], None],
    access_log: bool,
    expect: Callable[[Engine], Expectation] = lambda engine: Expectation(),
    recovered: Callable[[Recovery], str] = str,
) -> None:
    """Serve until a signal; tells where, when it is ready, and in the words of `recovered` that an answer went on after a
    stage was lost. `expect` may take seconds: it is asked once the model runs."""
    if access_log:
        log_to_stderr()

    def listening(url: str) -> None:
        say(f"dashboard {url}/   API {url}/v1   metrics {url}/metrics   (loading; /health/ready tells how far)")

    def ready(slot: EngineSlot, engine: Engine) -> None:
        say(f"ready: {engine.model.name} {engine.model.quantization} in {len(engine.stages)} stage(s); Ctrl-C drains and ends")
        if left := getattr(engine, "unfinished", ()):
            what = "1 answer of an earlier server was" if len(left) == 1 else f"{len(left)} answers of an earlier server were"
            say(f"{what} not finished; whoever waited has to ask again")
        watcher.follow(slot)
        slot.expectation = expect(engine)

    watcher = RecoveryLog(recovered)
    try:
        serve_forever(launch, settings, keys=keys, on_listening=listening, on_ready=ready)
    finally:
        watcher.end()


class RecoveryLog:
    """A line of log for every answer that went on after a stage was lost, from a thread of its own."""

    def __init__(self, words: Callable[[Recovery], str]) -> None:
        self._words, self._ended = words, threading.Event()
        self._thread: threading.Thread | None = None
        self._engine: Engine | None = None
        self._num_told = 0

    def follow(self, slot: EngineSlot) -> None:
        """Begin; the engine of the slot may be another one later."""
        self._thread = threading.Thread(target=self._run, args=(slot,), name="recovery-log", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Tell what is left, and end."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, slot: EngineSlot) -> None:
        last = False
        while not last:
            last = self._ended.wait(_LOOK_EVERY_S)
            self._look(slot.engine)

    def _look(self, engine: Engine | None) -> None:
        if engine is None:
            return
        if engine is not self._engine:
            self._engine, self._num_told = engine, 0
        recoveries = list(engine.recoveries)
        for recovery in recoveries[self._num_told :]:
            log.warning("%s", self._words(recovery))
        self._num_told = len(recoveries)
