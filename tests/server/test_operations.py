"""Operations on a deployment that cannot move under load (it is drained and launched anew), previews, and refusals by status."""

from __future__ import annotations

import threading
from collections.abc import Callable

import httpx
import pytest

from shardwise.deploy.deployment import Deployment
from shardwise.deploy.launcher import launch_local
from shardwise.errors import (
    AuthenticationFailed,
    ContextFull,
    QueueFull,
    SessionLost,
    ShardwiseError,
    StageCrashed,
    StageLoadFailed,
    UnsupportedModelError,
    UsageError,
)
from shardwise.server.engine import EngineSlot
from shardwise.server.operations import Operator, preview_split
from shardwise.server.problems import from_error
from shardwise.session.request import Readiness

from .running import running_server, wait_until


class Standing:
    """A deployment that only stands; it shares model and stages with a real one."""

    def __init__(self, real: Deployment) -> None:
        self.model, self.stages, self.recoveries = real.model, real.stages, []
        self.closed_with: float | None = None

    def readiness(self) -> Readiness:
        return Readiness(ready=True)

    def close(self, drain_s: float = 0.0) -> None:
        self.closed_with = drain_s


def test_who_is_at_the_tokenizer_while_the_model_is_stopped_gets_an_answer() -> None:
    """Requests that count tokens while their deployment is closed: its vocabulary is not taken away under them."""
    text = "A long story about tea. " * 4000
    seen: list[int] = []
    with launch_local("sample", num_stages=1, max_sessions=1, context_tokens=64) as built, running_server(built) as server:
        wanted = server.http.post("/tokenize", json={"content": text}).json()["count"]
        done = threading.Event()

        def count() -> None:
            while not done.is_set():
                seen.append(httpx.post(f"{server.url}/tokenize", json={"content": text}, timeout=30).json()["count"])

        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(seen) > 4, 20, "some answers")
        built.close()
        before = len(seen)
        wait_until(lambda: len(seen) > before + 8, 20, "answers after the end")
        done.set()
        for thread in threads:
            thread.join(20)
    assert set(seen) == {wanted}


def test_stop_start_and_a_new_split_by_a_new_launch(deployment: Deployment) -> None:
    launches: list[tuple[int, ...]] = []
    notes: list[str] = []
    go = threading.Event()

    def relaunch(layers: tuple[int, ...], on_progress: Callable[[str, float], None]) -> Standing:
        on_progress("loading", 0.5)
        assert go.wait(20)
        launches.append(layers)
        if layers == (1, 29):
            raise StageLoadFailed("the slice is cut off")
        return Standing(deployment)

    first = Standing(deployment)
    slot = EngineSlot(first)  # type: ignore[arg-type]
    operator = Operator(slot, relaunch, drain_s=3.0, note=lambda kind, text: notes.append(text))  # type: ignore[arg-type]
    assert (
        operator.allowed() | {"drain": True, "stop": True, "start": False, "restart": False, "live": False} == operator.allowed()
    )
    operator.stop()
    wait_until(lambda: slot.availability().status == "stopped" and operator.allowed()["start"], 10, "the stop")
    assert first.closed_with == 3.0
    with pytest.raises(UsageError, match="no model is running"):
        operator.stop()
    operator.start()
    with pytest.raises(QueueFull, match="another operation"):
        operator.start()
    wait_until(lambda: slot.availability().progress == 0.5, 10, "the progress")
    assert slot.availability().status == "loading"
    go.set()
    wait_until(lambda: slot.availability().ready and operator.allowed()["replan"], 10, "the start")
    operator.apply((10, 20))
    wait_until(lambda: len(launches) == 2 and slot.availability().ready and operator.allowed()["replan"], 10, "the new split")
    assert launches == [(), (10, 20)]
    operator.apply((1, 29))
    wait_until(lambda: slot.availability().status == "failed", 10, "the failure")
    assert "cut off" in slot.availability().reason
    assert any("new split 10+20: done" in text for text in notes)
    with pytest.raises(UsageError, match="no model is running"):
        operator.preview((15, 15))


def test_a_preview_names_every_layer_that_changes_hands(deployment: Deployment) -> None:
    preview = preview_split(deployment.model, deployment.stages, (10, 10, 10))
    assert [(move.layers, move.source[:7], move.target[:7]) for move in preview.moves] == [
        ((10, 15), "stage 0", "stage 1"),
        ((20, 30), "stage 1", "stage 2"),
    ]
    assert preview.moved_bytes == sum(deployment.model.layers[index].weight_bytes for index in [*range(10, 15), *range(20, 30)])
    assert not preview_split(deployment.model, deployment.stages, (15, 15)).moves
    for wrong in ((), (30, 0), (31,), (-1, 31)):
        with pytest.raises(UsageError):
            preview_split(deployment.model, deployment.stages, wrong)


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (ContextFull("x"), 400, False),
        (UsageError("x", field="n"), 400, False),
        (UnsupportedModelError("x"), 422, False),
        (QueueFull("x"), 429, True),
        (StageCrashed("x"), 503, True),
        (SessionLost("x"), 503, True),
        (AuthenticationFailed("x"), 503, True),
        (ShardwiseError("x"), 500, False),
    ],
)
def test_every_error_has_the_status_that_clients_act_upon(error: ShardwiseError, status: int, retry: bool) -> None:
    problem = from_error(error)
    assert problem.status == status
    assert ("Retry-After" in problem.headers) == retry
    assert set(problem.body["error"]) >= {"message", "type", "param", "code"}
