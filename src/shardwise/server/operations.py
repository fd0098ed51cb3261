"""What can be done to a running deployment from the dashboard: drain, stop, start, restart a machine's workers, re-plan.

A re-plan is previewed first: which layers would change hands, and how many bytes that is. A deployment that is `Movable` changes
under load and loses no request; another one is drained, closed and launched anew. Every operation runs in a thread of its own.

**Promises:** one operation at a time; where a move fails the old split goes on. **Fails when:** the new split is impossible
(`UsageError`, at once) or a new launch fails (the slot then says why). **Called by:** the routes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol, runtime_checkable

from shardwise.errors import QueueFull, RemoteFailure, ShardwiseError, UsageError
from shardwise.model.description import ModelDescription
from shardwise.records import Record
from shardwise.server.engine import Engine, EngineSlot, StageLike


class Relaunch(Protocol):
    """Launches the deployment with another split; an empty one is the split it was started with."""

    def __call__(self, layers: tuple[int, ...], on_progress: Callable[[str, float], None]) -> Engine: ...


class Move(Record):
    """Consecutive layers that would change hands."""

    layers: tuple[int, int]
    source: str
    target: str
    weight_bytes: int


class Preview(Record):
    """What a new split would move."""

    layers: tuple[int, ...]
    moves: tuple[Move, ...]
    moved_bytes: int
    stage_weight_bytes: tuple[int, ...]


def preview_split(model: ModelDescription, stages: Sequence[StageLike], layers: tuple[int, ...]) -> Preview:
    """Compare the running split with another one, layer by layer; `UsageError` where it does not fit the model."""
    if not layers or min(layers) < 1 or sum(layers) != model.num_layers:
        raise UsageError(
            f"layers {','.join(map(str, layers))} add up to {sum(layers)}, the model has {model.num_layers}", where="layers"
        )
    before = [_name(stage.index, stage.node) for stage in stages for _ in range(*stage.layers)]
    ends = list(accumulate(layers))
    spans = [(end - count, end) for end, count in zip(ends, layers)]
    nodes = [stage.node for stage in stages]
    names = [_name(index, nodes[min(index, len(nodes) - 1)]) for index in range(len(layers))]
    after = [name for name, (start, end) in zip(names, spans) for _ in range(start, end)]
    moves: list[Move] = []
    for index, (source, target) in enumerate(zip(before, after)):
        if source == target:
            continue
        size = model.layers[index].weight_bytes
        if moves and moves[-1].layers[1] == index and (moves[-1].source, moves[-1].target) == (source, target):
            last = moves.pop()
            moves.append(
                Move(layers=(last.layers[0], index + 1), source=source, target=target, weight_bytes=last.weight_bytes + size)
            )
        else:
            moves.append(Move(layers=(index, index + 1), source=source, target=target, weight_bytes=size))
    return Preview(
        layers=layers,
        moves=tuple(moves),
        moved_bytes=sum(move.weight_bytes for move in moves),
        stage_weight_bytes=tuple(model.stage_weight_bytes(*span) for span in spans),
    )


def _name(index: int, node: str) -> str:
    return f"stage {index} ({node})" if node else f"stage {index}"


@runtime_checkable
class Movable(Protocol):
    """A deployment that can change under load, without losing a request."""

    def relayout(self, layers: tuple[int, ...] = ()) -> None: ...

    def replace_worker(self, stage: int) -> None: ...

    def drain(self, node: str) -> None: ...


class Operator:
    """Acts on the slot's deployment. `note(kind, text)` is told how an operation went."""

    def __init__(
        self, slot: EngineSlot, relaunch: Relaunch, *, drain_s: float, note: Callable[[str, str], None] = lambda kind, text: None
    ) -> None:
        self._slot, self._relaunch, self._drain_s, self._note = slot, relaunch, drain_s, note
        self._busy = threading.Lock()

    def allowed(self) -> dict[str, bool]:
        """Which operations make sense now; `live` tells that a new split loses no request."""
        engine = self._slot.engine
        idle = not self._busy.locked()
        live = engine is not None and isinstance(engine, Movable)
        return {
            "drain": engine is not None and not self._slot.draining,
            "resume": engine is not None and self._slot.draining and idle,
            "stop": engine is not None and idle,
            "start": engine is None and idle and self._slot.stopped,
            "restart": live and idle,
            "leave": live and idle and engine is not None and len({stage.node for stage in engine.stages}) > 1,
            "replan": engine is not None and idle,
            "live": live,
        }

    def preview(self, layers: tuple[int, ...]) -> Preview:
        """What the split would move."""
        engine = self._running()
        return preview_split(engine.model, engine.stages, layers)

    def apply(self, layers: tuple[int, ...]) -> None:
        """Begin to move to the split; returns at once."""
        engine = self._running()
        preview_split(engine.model, engine.stages, layers)
        what = f"new split {'+'.join(map(str, layers))}"
        if isinstance(engine, Movable):
            self._in_background(what, lambda: engine.relayout(layers), keeps_running=True)
        else:
            self._in_background(what, lambda: self._move(layers))

    def stop(self) -> None:
        """Begin to drain and close; returns at once."""
        self._running()
        self._in_background("stop", self._close)

    def start(self) -> None:
        """Begin to launch as it was launched first; returns at once."""
        if self._slot.engine is not None:
            raise UsageError("the model is running already", where="start")
        self._in_background("start", lambda: self._launch(()))

    def restart_node(self, node: str) -> None:
        """Begin to replace a machine's workers one by one; the sessions go on."""
        engine, chosen = self._movable_on(node)

        def replace_all() -> None:
            for stage in chosen:
                engine.replace_worker(stage)

        self._in_background(f"new workers on {node}", replace_all, keeps_running=True)

    def leave_node(self, node: str) -> None:
        """Begin to move every stage away from a machine that is to be switched off."""
        engine, _ = self._movable_on(node)
        self._in_background(f"everything leaves {node}", lambda: engine.drain(node), keeps_running=True)

    def _movable_on(self, node: str) -> tuple[Movable, list[int]]:
        engine = self._running()
        chosen = [stage.index for stage in engine.stages if stage.node == node]
        if not chosen or not isinstance(engine, Movable):
            raise UsageError(f"no machine '{node[:80]}' holds a stage that can be moved", where="node")
        return engine, chosen

    def _running(self) -> Engine:
        engine = self._slot.engine
        if engine is None:
            raise UsageError("no model is running", where="operate", hint="start it first")
        return engine

    def _in_background(self, what: str, work: Callable[[], object], *, keeps_running: bool = False) -> None:
        """Do it in a thread; where it fails the slot fails too, unless the old deployment `keeps_running`."""
        if not self._busy.acquire(blocking=False):
            raise QueueFull("another operation is under way", hint="wait for its end")

        def run() -> None:
            failure: ShardwiseError | None = RemoteFailure(f"{what} broke; the log has the reason", where="operate")
            try:
                work()
                failure = None
            except ShardwiseError as error:
                failure = error
            finally:
                if failure is not None and not keeps_running:
                    self._slot.fail(failure)
                self._note("good" if failure is None else "bad", f"{what}: {'done' if failure is None else failure.one_line()}")
                self._busy.release()

        self._note("info", f"{what}: begun")
        threading.Thread(target=run, name="operate", daemon=True).start()

    def _close(self) -> None:
        engine = self._running()
        self._slot.drain()
        engine.close(self._drain_s)
        self._slot.empty()

    def _launch(self, layers: tuple[int, ...]) -> None:
        self._slot.begin()
        self._slot.fill(self._relaunch(layers, self._slot.on_progress))

    def _move(self, layers: tuple[int, ...]) -> None:
        self._close()
        self._launch(layers)
