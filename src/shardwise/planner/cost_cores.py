"""Stages of one machine on its cores: who computes where, and how fast, while the event simulation runs.

A step that wakes up goes to a core; steps on one core share it equally (processor sharing). The scheduler looks for an
idle core at that moment, but the sender of the message still runs on one and is about to sleep, so with more stages than
cores a step is often queued behind another while a core falls idle a moment later; it is moved there only at the next
balancing (EEVDF and CFS: `select_idle_sibling` at wake-up, `newidle_balance` and the tick after). With a core for each
stage everyone keeps its own. Threads that move messages, and the driver, take cores too. In: works. Out: speeds and the
next change. Nothing fails.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

BALANCE_S = 4e-3  # a tick of the usual 250 Hz: after that a queued step has been moved to an idle core


@dataclass(slots=True)
class Work:
    """What somebody computes: seconds left at full speed."""

    left_s: float
    started_s: float
    rows: tuple[int, ...] = ()
    chunk: int = -1
    group: int = -1  # whose cores; -1: its own
    core: int = -1
    moves_s: float = math.inf  # when it may be moved


class Cores:
    """The works that are computed now: those of the stages by number, and others (I/O threads, the driver)."""

    def __init__(self, groups: list[int], num_cores: float, shared_speed: float, rng: random.Random) -> None:
        self._groups, self._shared_speed, self._random = groups, shared_speed, rng
        self._slots = max(1, round(num_cores)) if num_cores else 0
        self._crowded = min(1.0, num_cores / self._slots) if self._slots else 1.0
        self._others = len(groups)
        self.works: dict[int, Work] = {}
        self.now_s = 0.0

    def start(self, stage: int, work: Work) -> None:
        """Give a stage's step a core."""
        work.group = self._groups[stage] if self._slots else -1
        if work.group >= 0:
            own = self._groups.count(work.group) <= self._slots  # with a core for each everyone keeps its own
            work.core = self._groups[:stage].count(work.group) if own else self._random.randrange(self._slots)
            work.moves_s = self.now_s + BALANCE_S
        self.works[stage] = work

    def beside(self, stage: int, seconds: float) -> None:
        """Keep a core of the stage's machine busy with something that no step waits for."""
        group = self._groups[stage] if self._slots else -1
        if group >= 0 and seconds > 0:
            self._others += 1
            core = self._random.randrange(self._slots)
            self.works[self._others] = Work(seconds, self.now_s, (), -1, group, core, self.now_s + BALANCE_S)

    def _on(self, group: int, core: int) -> int:
        return sum(1 for work in self.works.values() if work.group == group and work.core == core)

    def speed(self, work: Work) -> float:
        """Share of its full speed at which it computes now."""
        if work.core < 0:
            return 1.0
        busy = {w.core for w in self.works.values() if w.group == work.group}
        own = 1.0 / self._on(work.group, work.core)
        return own * (self._shared_speed if len(busy) > 1 else 1.0) * (self._crowded if len(busy) == self._slots else 1.0)

    def advance(self, to_s: float) -> None:
        """Let all compute until `to_s`, then move those that wait for a core while one is idle."""
        if to_s > self.now_s:
            speeds = [self.speed(work) for work in self.works.values()]
            for work, speed in zip(self.works.values(), speeds):
                work.left_s -= (to_s - self.now_s) * speed
            self.now_s = to_s
        for work in self.works.values():
            if work.moves_s <= self.now_s and (core := self._better(work)) >= 0:
                work.core = core

    def next_change(self) -> tuple[float, int]:
        """When the next work is finished, and whose; (time, -1) where one is to be moved before that."""
        if not self.works:
            return math.inf, -1
        done_s, number = min((self.now_s + work.left_s / self.speed(work), n) for n, work in self.works.items())
        moves = [w.moves_s for w in self.works.values() if self.now_s < w.moves_s < done_s and self._better(w) >= 0]
        return (min(moves), -1) if moves else (done_s, number)

    def _better(self, work: Work) -> int:
        """An idle core for one that shares its own, or -1."""
        if work.core < 0 or self._on(work.group, work.core) < 2:
            return -1
        return next((core for core in range(self._slots) if not self._on(work.group, core)), -1)
