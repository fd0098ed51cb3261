"""The live view: a picture twice a second to everybody who looks, and a log of what happened.

**Promises:** a stage that dies shows within a second, because stage states are read without asking the stages; a stage that does
not answer delays nothing but its own figures. Nobody looking: nothing is asked. **Called by:** the dashboard's stream, `top`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import shardwise
from shardwise.clock import Clock
from shardwise.errors import ShardwiseError
from shardwise.records import plain
from shardwise.server import snapshot, sse
from shardwise.server.activity import Activity
from shardwise.server.engine import Availability, Engine, EngineSlot, OnMachines
from shardwise.server.tracing import Traces
from shardwise.transport.messages import Stats

INTERVAL_S = 0.5
LOOKS = 5  # in an interval, at whether generation works: an outage may be shorter than it
STATS_INTERVAL_S = 1.0
HISTORY = 240


class LiveView:
    """One a server; `start` and `stop` belong to the application's lifespan."""

    def __init__(self, slot: EngineSlot, activity: Activity, traces: Traces, clock: Clock) -> None:
        self._slot, self._activity, self._traces, self._clock = slot, activity, traces, clock
        self._events: deque[dict[str, Any]] = deque(maxlen=200)
        self._history: deque[dict[str, float]] = deque(maxlen=HISTORY)
        self._stats: list[Stats] = []
        self._stats_at_s: float | None = None
        self._seen_states: dict[int, str] = {}
        self._seen_pids: dict[int, int] = {}
        self._seen_status = ""
        self._seen_recoveries = self._seen_notes = 0
        self._last_tokens = 0
        self._last_at_s = clock.now_s()
        self._latest: dict[str, Any] = {}
        self._encoded = b""  # the same as an event, once somebody looks at it
        self._changed = asyncio.Condition()
        self._ending = False
        self._tasks: list[asyncio.Task[None]] = []
        self._started_s = clock.wall_s()
        self.capacities: dict[str, int] = {}
        self.operations: Callable[[], dict[str, Any]] = dict

    def start(self) -> None:
        """Begin to watch; needs a running loop."""
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._ask_stages())]

    def end_streams(self) -> None:
        """Let everybody who looks go, within one interval: the server is about to end."""
        self._ending = True

    async def stop(self) -> None:
        """End the tasks."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task

    def note(self, kind: str, text: str) -> None:
        """Add to the log: kind is good | bad | info."""
        self._events.append({"at_s": self._clock.wall_s(), "kind": kind, "text": text})

    async def pictures(self) -> AsyncIterator[bytes]:
        """The newest picture at once, then each new one, as events; encoded once, however many look."""
        self._traces.watchers += 1
        try:
            if self._latest:
                yield self._event()
            while not self._ending:
                async with self._changed:
                    await self._changed.wait()
                yield self._event()
        finally:
            self._traces.watchers -= 1

    def _event(self) -> bytes:
        self._encoded = self._encoded or sse.data(self._latest)
        return self._encoded

    async def picture(self) -> dict[str, Any]:
        """The picture of this moment."""
        return await asyncio.to_thread(self._draw)

    async def _watch(self) -> None:
        while True:
            self._latest, self._encoded = await asyncio.to_thread(self._draw), b""
            async with self._changed:
                self._changed.notify_all()
            await self._until_next()

    async def _until_next(self) -> None:
        """The next picture is due: after the interval, or at once when generation stops or works again."""
        for _ in range(LOOKS):
            await asyncio.sleep(INTERVAL_S / LOOKS)
            if self._slot.availability().status != self._seen_status:
                return

    async def _ask_stages(self) -> None:
        while True:
            engine = self._slot.engine
            if engine is not None and (self._traces.watchers or self._stats_at_s is None):
                with suppress(ShardwiseError):  # a stage that does not answer: its last figures stay, with their age
                    self._stats = list(await asyncio.to_thread(engine.stats))
                    self._stats_at_s = self._clock.now_s()
            await asyncio.sleep(STATS_INTERVAL_S)

    def _draw(self) -> dict[str, Any]:
        said = self._slot.availability()
        engine = self._slot.engine
        now_s = self._clock.now_s()
        self._measure(now_s)
        self._log_changes(said, engine)
        out: dict[str, Any] = {
            "at_s": self._clock.wall_s(),
            "version": shardwise.__version__,
            "uptime_s": self._clock.wall_s() - self._started_s,
            "availability": asdict(said),
            "requests": list(self._activity.rows()),
            "totals": {"requests": self._activity.total_requests, "generated_tokens": self._activity.total_generated_tokens},
            "history": list(self._history),
            "events": list(self._events),
            "path": self._traces.newest_path,
            "stats_age_s": None if self._stats_at_s is None else now_s - self._stats_at_s,
            "operations": self.operations(),
        }
        if engine is not None:
            stages = snapshot.stage_pictures(engine, self._stats)
            out |= {
                "model": snapshot.model_picture(engine),
                "stages": stages,
                "nodes": snapshot.node_pictures(
                    stages, self.capacities | (engine.capacities if isinstance(engine, OnMachines) else {})
                ),
                "boundaries": snapshot.boundary_pictures(engine, self._stats, self._slot.expectation.prediction),
                **snapshot.expectation_picture(self._slot.expectation),
                "recoveries": [plain(one) for one in engine.recoveries],
            }
        return out

    def _measure(self, now_s: float) -> None:
        passed_s = now_s - self._last_at_s
        if passed_s < INTERVAL_S / 2:
            return
        tokens = self._activity.total_generated_tokens
        rate = (tokens - self._last_tokens) / passed_s
        self._last_tokens, self._last_at_s = tokens, now_s
        self._history.append({"tokens_per_s": rate, "requests": float(len(self._activity.active))})

    def _log_changes(self, said: Availability, engine: Engine | None) -> None:
        if said.status != self._seen_status:
            self.note("good" if said.ready else "info" if said.status == "loading" else "bad", _status_text(said))
            self._seen_status = said.status
        if engine is None:
            return
        for stage in engine.stages:
            pid, old_pid = stage.pid or 0, self._seen_pids.get(stage.index, 0)
            if pid and old_pid and pid != old_pid:
                self.note(
                    "bad", f"stage {stage.index} on {stage.node or 'this machine'}: process {old_pid} is gone, {pid} starts"
                )
            self._seen_pids[stage.index] = pid or old_pid
            before = self._seen_states.get(stage.index)
            if before is not None and before != stage.state:
                kind = "good" if stage.state == "ready" else "bad" if stage.state in ("gone", "lost", "failed") else "info"
                self.note(kind, f"stage {stage.index} on {stage.node or 'this machine'}: {before} → {stage.state}")
            self._seen_states[stage.index] = stage.state
        recoveries = list(engine.recoveries)
        for one in recoveries[self._seen_recoveries :]:
            self.note("good", f"recovered at token {one.at_token}: {one.cause}; {one.action}, stalled {one.stall_s:.2f} s")
        self._seen_recoveries = len(recoveries)
        notes = list(engine.notes) if isinstance(engine, OnMachines) else []
        for said_of in notes[min(self._seen_notes, len(notes)) :]:
            self.note(said_of.kind, said_of.text)
        self._seen_notes = len(notes)


def _status_text(said: Availability) -> str:
    text = {"ready": "generation works", "loading": "loading", "draining": "draining"}.get(
        said.status, "generation does not work"
    )
    return f"{text}: {said.reason}" if said.reason else text
