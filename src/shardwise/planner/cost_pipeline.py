"""How stages and links add up: a ring of stages for one user and for many, chunks of a prompt, drafts, availability.

Pure arithmetic on seconds; every formula names its source.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def prefill_s(stage_chunk_s: Sequence[Sequence[float]], hop_s: Sequence[float]) -> float:
    """Seconds until the last chunk leaves the last stage.

    `stage_chunk_s[s][i]` is stage s on chunk i; `hop_s[s]` the way from s to s + 1. The recurrence of a permutation
    flow shop (Johnson 1954); with equal chunks it is `sum t_s + (chunks - 1) * max t_s + hops` (GPipe, Huang 2019).
    """
    done = [0.0] * len(stage_chunk_s[0])
    for stage, times in enumerate(stage_chunk_s):
        arrival = [t + (hop_s[stage - 1] if stage else 0.0) for t in done]
        free = 0.0
        for chunk, seconds in enumerate(times):
            free = max(free, arrival[chunk]) + seconds
            done[chunk] = free
    return done[-1]


def uniform_prefill_s(stage_s: Sequence[float], num_chunks: int, hop_s: Iterable[float]) -> float:
    """The closed form for equal chunks: `sum t_s + (chunks - 1) * max t_s + hops`."""
    return sum(stage_s) + (num_chunks - 1) * max(stage_s) + sum(hop_s)


def batch_rows(num_users: int, num_stages: int) -> int:
    """Decode rows that a stage merges at most: `ceil(sessions / stages)`, so every stage has work; fewer where that is faster."""
    return -(-num_users // max(1, num_stages))


def pipelined_throughput(num_users: int, round_trip_s: float, slowest_s: float) -> float:
    """Tokens/s of `num_users` single rows in a ring: `min(R / T, 1 / slowest)` (Little 1961; asymptotic bound, Kleinrock)."""
    return min(num_users / round_trip_s, 1.0 / slowest_s)


def ring_token_s(num_users: int, num_stages: int, round_trip_s: float, slowest_s: float) -> float:
    """Seconds per token for one of R users when groups of `batch_rows` go round: `max(T, groups * slowest)`."""
    groups = math.ceil(num_users / batch_rows(num_users, num_stages))
    return max(round_trip_s, groups * slowest_s)


def speculation_tokens(acceptance: float, draft_tokens: int) -> float:
    """Tokens per verified step: `(1 - a^(g+1)) / (1 - a)` (Leviathan, Kalman, Matias 2023)."""
    if acceptance >= 1.0:
        return draft_tokens + 1.0
    return float((1.0 - acceptance ** (draft_tokens + 1)) / (1.0 - acceptance))


def pipeline_availability(nodes: Iterable[float]) -> float:
    """All nodes of a pipeline must be up: the product."""
    return math.prod(nodes)


def replicated_availability(pipelines: Iterable[float]) -> float:
    """At least one of several disjoint replicas is up."""
    return 1.0 - math.prod(1.0 - a for a in pipelines)
