"""What can be done to a running deployment from the dashboard: drain, stop, start, restart a machine's workers, re-plan.

A re-plan is previewed first: which layers would change hands, and how many bytes that is. Applying it drains, closes and launches
anew, because a stage's slice is loaded once. Every operation runs in a thread of its own; the slot tells what is going on.

**Promises:** one operation at a time; running requests end first (at most `drain_s`). **Fails when:** the new split is impossible
(`UsageError`, the old deployment keeps running) or cannot be launched (the slot then says why). **Called by:** the routes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

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


class Operator:
    """Acts on the slot's deployment."""

    def __init__(self, slot: EngineSlot, relaunch: Relaunch, *, drain_s: float) -> None:
        self._slot, self._relaunch, self._drain_s = slot, relaunch, drain_s
        self._busy = threading.Lock()

    def allowed(self) -> dict[str, bool]:
        """Which operations make sense now."""
        running = self._slot.engine is not None
        idle = not self._busy.locked()
        return {
            "drain": running and not self._slot.draining,
            "resume": running and self._slot.draining and idle,
            "stop": running and idle,
            "start": not running and idle and self._slot.stopped,
            "restart": running and idle and hasattr(self._slot.engine, "engine"),
            "replan": running and idle,
        }

    def preview(self, layers: tuple[int, ...]) -> Preview:
        """What the split would move."""
        engine = self._running()
        return preview_split(engine.model, engine.stages, layers)

    def apply(self, layers: tuple[int, ...]) -> None:
        """Begin to move to the split; returns at once."""
        engine = self._running()
        preview_split(engine.model, engine.stages, layers)
        self._in_background(lambda: self._move(layers))

    def stop(self) -> None:
        """Begin to drain and close; returns at once."""
        self._running()
        self._in_background(self._close)

    def start(self) -> None:
        """Begin to launch as it was launched first; returns at once."""
        if self._slot.engine is not None:
            raise UsageError("the model is running already", where="start")
        self._in_background(lambda: self._launch(()))

    def restart_node(self, node: str) -> None:
        """End a machine's workers; recovery starts them again and the sessions go on."""
        engine = self._running()
        chosen = [stage for stage in engine.stages if stage.node == node]
        workers = getattr(engine, "engine", None)
        if not chosen or workers is None:
            raise UsageError(f"no machine '{node[:80]}' holds a stage", where="node")
        for stage in chosen:
            workers.stop(engine.worker_name(stage.index) if hasattr(engine, "worker_name") else f"stage-{stage.index}")

    def _running(self) -> Engine:
        engine = self._slot.engine
        if engine is None:
            raise UsageError("no model is running", where="operate", hint="start it first")
        return engine

    def _in_background(self, work: Callable[[], None]) -> None:
        if not self._busy.acquire(blocking=False):
            raise QueueFull("another operation is under way", hint="wait for its end")

        def run() -> None:
            failure: ShardwiseError | None = RemoteFailure("the operation broke; the log has the reason", where="operate")
            try:
                work()
                failure = None
            except ShardwiseError as error:
                failure = error
            finally:
                if failure is not None:
                    self._slot.fail(failure)
                self._busy.release()

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
