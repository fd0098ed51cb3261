"""A small seeded event simulation of the ring: what users see when they queue behind each other and links jitter.

There is no closed form for p95 with several users: stages merge what waits, prompts get in between, links reorder
nothing but delay at random. In: seconds of every step and hop. Out: first-token times and gaps between tokens. The
same seed gives the same numbers. Nothing fails; the number of simulated tokens is bounded.

Model: each stage is one server. It takes waiting decode rows first, at most `merge_rows`; the oldest prompt chunk comes when
no row waits, or after `DECODE_TURNS` decode steps (as `stage.batcher` does). Stages on one machine share its cores
(`cost_cores`). A link sends one message after the other and delivers in order. Service times spread log-normally: what disturbs
a step comes at random moments, so that the variance grows with its length and the relative spread falls with its root. Links
add an exponential delay whose p95 is the measured jitter.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.planner.cost_cores import Cores, Work

_P95_OF_EXPONENTIAL = math.log(20.0)
DECODE_TURNS = 4  # decode steps before a waiting chunk gets its turn


@dataclass(frozen=True, slots=True)
class HopTiming:
    """One directed hop: seconds a decode message (base + per row) or a prefill chunk keeps it busy, and its delay."""

    base_s: float
    row_s: float
    chunk_s: float
    latency_s: float
    jitter_p95_s: float
    cold_s: float = 0.0  # more for a prompt's first chunk: the connection has to pick up speed


@dataclass(frozen=True, slots=True)
class RingTiming:
    """Seconds of everything in one ring."""

    decode_s: Sequence[Sequence[float]]  # [stage][rows - 1]
    chunk_s: Sequence[Sequence[float]]  # [stage][chunk]
    hops: Sequence[HopTiming]  # [stage] -> next; the last one leads back to stage 0
    merge_rows: int
    service_jitter: float
    core_groups: Sequence[int] = ()  # [stage]: stages with the same number share cores; -1 or nothing: its own
    num_cores: float = 0.0  # of a group, in stages that can compute at the same time; 0 = enough for all
    shared_speed: float = 1.0  # of each of two stages that compute at the same time on cores of their own
    message_cpu_s: float = 0.0  # of a core, beside the stages, for every message on a hop
    driver_cpu_s: float = 0.0  # of a core beside stage 0, for every sampled token


@dataclass(slots=True)
class RingSamples:
    """What came out."""

    first_token_s: list[float] = field(default_factory=list)  # one a user
    gaps_s: list[float] = field(default_factory=list)
    decode_started_s: float = 0.0
    finished_s: float = 0.0
    tokens: int = 0
    busy_s: list[float] = field(default_factory=list)
    waits_s: list[list[float]] = field(default_factory=list)  # [stage]: how long it sat idle before each decode step
    stage_steps_s: list[list[float]] = field(default_factory=list)
    hop_delays_s: list[list[float]] = field(default_factory=list)


_Rows = tuple[int, ...]


class _Ring:
    def __init__(self, timing: RingTiming, users: int, tokens: int, seed: int) -> None:
        self.timing, self.tokens = timing, tokens
        self.random = random.Random(seed)
        stages = len(timing.decode_s)
        self.stages = stages
        self.out = RingSamples(busy_s=[0.0] * stages)
        self.out.waits_s = [[] for _ in range(stages)]
        self.out.stage_steps_s = [[] for _ in range(stages)]
        self.out.hop_delays_s = [[] for _ in range(stages)]
        self.decodes: list[deque[int]] = [deque() for _ in range(stages)]
        self.chunks: list[deque[tuple[int, int]]] = [deque() for _ in range(stages)]
        self.busy = [False] * stages
        self.turns = [0] * stages
        groups = list(timing.core_groups) or [-1] * stages
        self.cores = Cores(groups, timing.num_cores, timing.shared_speed, random.Random(seed + 1))
        self.idle_since = [0.0] * stages
        self.link_free = [0.0] * stages
        self.link_last = [0.0] * stages
        self.last_token_s = [0.0] * users
        self.left = [tokens] * users
        self.events: list[tuple[float, int, int, _Rows, int]] = []
        self.sequence = 0
        self.jitter_step_s = max(1e-9, min(step for steps in timing.decode_s for step in steps))

    def push(self, at_s: float, stage: int, rows: _Rows, chunk: int) -> None:
        heapq.heappush(self.events, (at_s, self.sequence, stage, rows, chunk))
        self.sequence += 1

    def spread(self, seconds: float) -> float:
        """`seconds` as they come out this time."""
        if self.timing.service_jitter <= 0:
            return seconds
        relative = self.timing.service_jitter * min(1.0, math.sqrt(self.jitter_step_s / max(1e-12, seconds)))
        sigma2 = math.log(1.0 + relative**2)
        return seconds * self.random.lognormvariate(-sigma2 / 2, math.sqrt(sigma2))

    def start(self, stage: int, now_s: float) -> None:
        """Give the idle stage its next step."""
        if self.busy[stage]:
            return
        waiting = self.decodes[stage]
        if waiting and not (self.chunks[stage] and self.turns[stage] >= DECODE_TURNS):
            self.turns[stage] += 1
            rows = tuple(waiting.popleft() for _ in range(min(len(waiting), self.timing.merge_rows)))
            seconds = self.spread(self.timing.decode_s[stage][len(rows) - 1])
            self.out.waits_s[stage].append(now_s - self.idle_since[stage])
            chunk = -1
        elif self.chunks[stage]:
            user, chunk = self.chunks[stage].popleft()
            self.turns[stage] = 0
            rows = (user,)
            seconds = self.spread(self.timing.chunk_s[stage][chunk])
        else:
            return
        self.busy[stage] = True
        self.cores.start(stage, Work(seconds, now_s, rows, chunk))

    def send(self, stage: int, now_s: float, rows: _Rows, chunk: int) -> None:
        """Put a step on the hop behind `stage`; deliver in order. A single stage queues its own tokens at once."""
        if self.stages == 1:
            self.decodes[0].extend(rows)
            return
        hop = self.timing.hops[stage]
        self.cores.beside(stage, self.timing.message_cpu_s)
        returning = stage == self.stages - 1
        busy_s = hop.base_s + hop.row_s * len(rows) if chunk < 0 or returning else hop.chunk_s
        begun = max(now_s, self.link_free[stage])
        self.link_free[stage] = begun + busy_s
        jitter_s = self.random.expovariate(_P95_OF_EXPONENTIAL / hop.jitter_p95_s) if hop.jitter_p95_s > 0 else 0.0
        cold_s = hop.cold_s if chunk == 0 and not returning else 0.0
        arrival = max(self.link_last[stage], begun + busy_s + hop.latency_s + jitter_s + cold_s)
        self.link_last[stage] = arrival
        if chunk < 0:
            self.out.hop_delays_s[stage].append(arrival - now_s)
        self.push(arrival, (stage + 1) % self.stages, rows, -1 if returning else chunk)

    def sampled(self, rows: _Rows, now_s: float, chunk: int) -> _Rows:
        """Book the new tokens; returns the sessions that go on."""
        going = []
        for user in rows:
            self.cores.beside(0, self.timing.driver_cpu_s)
            if chunk >= 0:
                self.out.first_token_s.append(now_s)
                self.out.decode_started_s = now_s
            else:
                self.out.gaps_s.append(now_s - self.last_token_s[user])
                self.out.tokens += 1
            self.last_token_s[user] = now_s
            self.left[user] -= 1
            self.out.finished_s = now_s
            if self.left[user] > 0:
                going.append(user)
        return tuple(going)

    def done(self, stage: int, now_s: float, rows: _Rows, chunk: int) -> None:
        self.busy[stage] = False
        self.idle_since[stage] = now_s
        last_chunk = chunk == len(self.timing.chunk_s[stage]) - 1
        if stage < self.stages - 1:
            self.send(stage, now_s, rows, chunk)
        elif chunk < 0 or last_chunk:
            going = self.sampled(rows, now_s, chunk)
            if going:
                self.send(stage, now_s, going, chunk)
        self.start(stage, now_s)

    def run(self, starts_s: Sequence[float] | None) -> RingSamples:
        for user in range(len(self.left)):
            if starts_s is None:
                self.chunks[0].extend((user, chunk) for chunk in range(len(self.timing.chunk_s[0])))
                continue
            self.last_token_s[user] = starts_s[user]
            self.left[user] -= 1
            if self.left[user] > 0:
                self.push(starts_s[user], 0, (user,), -1)
        self.start(0, 0.0)
        while self.events or self.cores.works:
            done_s, finished = self.cores.next_change()
            if not self.events or done_s <= self.events[0][0]:
                self.cores.advance(done_s)
                if finished < 0:
                    continue
                work = self.cores.works.pop(finished)
                if finished >= self.stages:
                    continue
                took_s = done_s - work.started_s
                self.out.busy_s[finished] += took_s
                if work.chunk < 0:
                    self.out.stage_steps_s[finished].append(took_s)
                self.done(finished, done_s, work.rows, work.chunk)
                continue
            now_s, _, stage, rows, chunk = heapq.heappop(self.events)
            self.cores.advance(now_s)
            if chunk < 0:
                self.decodes[stage].extend(rows)
            else:
                self.chunks[stage].append((rows[0], chunk))
            self.start(stage, now_s)
        return self.out


def simulate_ring(
    timing: RingTiming, num_users: int, output_tokens: int, seed: int = 0, starts_s: Sequence[float] | None = None
) -> RingSamples:
    """Let `num_users` start together and produce `output_tokens` each.

    With `starts_s` the prompts have been read elsewhere and each session brings its first token at that time.
    """
    return _Ring(timing, num_users, max(1, output_tokens), seed).run(starts_s)


def quantile(values: Sequence[float], q: float) -> float:
    """Linear quantile; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
