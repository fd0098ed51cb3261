"""What goes wrong and when, as data. Tests, benchmarks and the simulation all read the same schedules.

A `FaultPlan` is a list of `Fault`s; each names a kind, a target and a moment (a time, a token number, or the
prefill). Nothing here acts: whoever runs a plan asks `FaultClock` what is due and carries it out through a seam
(the lab's relay, signals to worker processes, a virtual network). The same seed gives the same plan.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal

from shardwise.errors import UsageError
from shardwise.records import Record
from shardwise.transport.shaping import LinkShape

FaultKind = Literal[
    "kill",  # SIGKILL to the target's worker
    "stop",  # SIGSTOP, and SIGCONT after `duration_s`: what a sleeping laptop looks like
    "restart",  # an orderly end and a new start
    "cut",  # the target's cable is out for `duration_s`
    "one_way_cut",  # only what the target sends is lost
    "slow_link",  # the target's link has `shape` for `duration_s`
    "bulk",  # a bulk transfer from `target` to `peer` for `duration_s`
    "slow_node",  # the target gets `cpu_share` cores for `duration_s`
    "roam",  # a Wi-Fi hand-over: cut for `duration_s`, then `shape`
    "full_disk",
    "corrupt_slice",  # a byte of the target's slice changes; seen at the next load
    "version_mismatch",  # the target comes back speaking another protocol version
    "driver_restart",
]
_NEEDS_DURATION = {"stop", "cut", "one_way_cut", "slow_link", "bulk", "slow_node", "roam"}
_RANDOM_KINDS: tuple[FaultKind, ...] = ("kill", "stop", "restart", "cut", "one_way_cut", "slow_link", "slow_node")


class Fault(Record):
    """One fault. Exactly one of `after_s`, `at_token`, `in_prefill` says when (seconds from the request's start)."""

    kind: FaultKind
    target: str = ""  # a host or stage; "" only for driver_restart
    after_s: float | None = None
    at_token: int | None = None
    in_prefill: bool = False
    duration_s: float = 0.0
    peer: str = ""
    cpu_share: float = 0.0
    shape: LinkShape | None = None

    def __post_init__(self) -> None:
        if sum([self.after_s is not None, self.at_token is not None, self.in_prefill]) != 1:
            self._refuse("when", "give exactly one of after_s, at_token, in_prefill")
        if self.after_s is not None and not (math.isfinite(self.after_s) and self.after_s >= 0):
            self._refuse("after_s", "a finite number of seconds, 0 or more")
        if self.at_token is not None and self.at_token < 1:
            self._refuse("at_token", "1 or more")
        if not self.target and self.kind != "driver_restart":
            self._refuse("target", "name a host or a stage")
        if self.kind in _NEEDS_DURATION and not (math.isfinite(self.duration_s) and self.duration_s > 0):
            self._refuse("duration_s", "a positive number of seconds")
        if self.kind == "bulk" and not self.peer:
            self._refuse("peer", "where the bulk transfer goes")
        if self.kind == "slow_node" and not 0 < self.cpu_share < 1024:
            self._refuse("cpu_share", "a positive number of cores")
        if self.kind in ("slow_link", "roam") and self.shape is None:
            self._refuse("shape", "the link's shape from then on")

    def _refuse(self, field: str, allowed: str) -> None:
        raise UsageError(
            f"the fault '{self.kind}' has a bad '{field}'", where=f"fault on {self.target!r}", hint=allowed, field=field
        )

    def describe(self) -> str:
        """One line for people."""
        when = "in prefill" if self.in_prefill else f"at token {self.at_token}" if self.at_token else f"after {self.after_s:g} s"
        lasts = f" for {self.duration_s:g} s" if self.duration_s else ""
        return f"{self.kind.replace('_', ' ')} {self.target}".strip() + f" {when}{lasts}"


class FaultPlan(Record):
    """A schedule of faults."""

    faults: tuple[Fault, ...] = ()
    seed: int | None = None  # what it was drawn from, if it was

    @classmethod
    def draw(cls, seed: int, targets: Sequence[str], *, num_faults: int = 2, num_tokens: int = 100) -> FaultPlan:
        """Random faults from a seed; print the seed when a run fails, and it can be replayed."""
        if not targets:
            raise UsageError("no targets to draw faults for", where="FaultPlan.draw")
        rng = random.Random(seed)
        faults = []
        for _ in range(num_faults):
            kind = rng.choice(_RANDOM_KINDS)
            in_prefill = rng.random() < 0.2
            faults.append(
                Fault(
                    kind=kind,
                    target=rng.choice(list(targets)),
                    in_prefill=in_prefill,
                    at_token=None if in_prefill else rng.randint(1, max(1, num_tokens)),
                    duration_s=round(rng.uniform(0.2, 3.0), 3) if kind in _NEEDS_DURATION else 0.0,
                    cpu_share=round(rng.uniform(0.1, 0.5), 3) if kind == "slow_node" else 0.0,
                    shape=LinkShape(delay_s=0.1, bytes_per_s=125_000.0) if kind == "slow_link" else None,
                )
            )
        return cls(faults=tuple(faults), seed=seed)


class FaultClock:
    """Hands out each fault of a plan once, when its moment has come. Pure: the caller says where the run is."""

    def __init__(self, plan: FaultPlan) -> None:
        self._waiting = list(plan.faults)

    @property
    def exhausted(self) -> bool:
        return not self._waiting

    def due(self, *, elapsed_s: float, num_tokens: int, prefilling: bool = False) -> list[Fault]:
        """Faults whose moment has come, in the plan's order."""
        now = [fault for fault in self._waiting if _is_due(fault, elapsed_s, num_tokens, prefilling)]
        self._waiting = [fault for fault in self._waiting if fault not in now]
        return now

    def next_s(self) -> float | None:
        """The earliest timed fault still waiting, in seconds from the start."""
        return min((fault.after_s for fault in self._waiting if fault.after_s is not None), default=None)


def _is_due(fault: Fault, elapsed_s: float, num_tokens: int, prefilling: bool) -> bool:
    if fault.after_s is not None:
        return elapsed_s >= fault.after_s
    if fault.at_token is not None:
        return num_tokens >= fault.at_token
    return prefilling
