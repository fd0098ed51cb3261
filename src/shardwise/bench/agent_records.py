"""What the bench and its agent (the process inside the first host) say to each other: JSON lines. Data only."""

from __future__ import annotations

from shardwise.bench.result import Case, TrialError, TrialResult
from shardwise.records import Record
from shardwise.transport.faults import Fault


class AgentPlace(Record):
    """Where one stage's worker goes."""

    node: str
    host: str
    prefix: tuple[str, ...] = ()
    memory_limit_bytes: int = 0


class AgentJob(Record):
    """Everything an agent needs: one deployment and the cases to measure on it."""

    model: str
    places: tuple[AgentPlace, ...]
    driver_host: str
    cases: tuple[Case, ...]
    repetition: int
    layers: tuple[int, ...] = ()
    warm_up: int = 1
    context_tokens: int = 2048
    num_threads: int = 1
    trace_tokens: int = 12
    seed: int = 1
    shared_clock: bool = True  # all hosts are on one machine
    wire_dtype: str = "f32"
    faults: dict[str, tuple[Fault, ...]] = {}
    relayed: bool = False  # hosts reach each other through relays: ask for each way (`WayWanted`)


class WayWanted(Record):
    """How does `source` reach that port of `target`?"""

    source: str
    target: str
    port: int


class Way(Record):
    """So: the only thing that the agent is told after its job."""

    host: str
    port: int


class AgentWord(Record):
    """One line from the agent: exactly one field is set.

    `fault`: the bench shall act on the network or a host. `way`: it shall answer with a `Way`.
    """

    trial: TrialResult | None = None
    error: TrialError | None = None
    fault: Fault | None = None
    way: WayWanted | None = None
