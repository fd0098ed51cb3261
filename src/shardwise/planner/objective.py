"""What is minimized, as sums and maxima over stages and hops, so that search can be exact about it.

Every objective is `combine(A, M)`: A adds something over all stages and hops, M is the largest of something else. A
`Form` says what, as multiples of the times of a few typical steps. The event simulation is not part of it: it reports
what a chosen plan does, the closed forms choose.

    latency     A = (O-1) * decode + chunk, M = chunk            A + (chunks-1) * M          seconds of a request alone
    throughput  A = decode(r) + chunk / O,  M = work of a token  max(A, R * M) / R           seconds a token, R users
    bottleneck  M = decode                                       M                           seconds of the slowest part
    weighted    as throughput                                    w * A + (1 - w) * R * M
    fit         A = decode + chunks * chunk / O + 1e4 s a stage  A

O output tokens, R users, r = ceil(R / stages) rows merged, G = ceil(R / r) groups in the ring. The work of a token in a
stage is `G * decode(r) / R + chunks * chunk / O`. Hops count with their transfer time in A (with the token's way back to
stage 0) and with their occupancy in M (without it: 4 bytes). A typical chunk starts in the middle of the prompt and is
not sampled. Nothing here fails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.planner.cost_compute import StepShape
from shardwise.planner.cost_pipeline import batch_rows, speculation_tokens
from shardwise.planner.types import Objective, Speculation, Workload

FIT_PENALTY_S = 1e4  # a token of any plan that fits takes less


@dataclass(frozen=True, slots=True)
class Term:
    """`add` times the seconds of this step go into A, `peak` times into M; `back` times its way back go into A."""

    shape: StepShape
    add: float
    peak: float
    back: float
    first_s: float = 0.0  # what the first stage does beside it: drafting

    @property
    def is_prefill(self) -> bool:
        """Whether it is a chunk of a prompt (which never goes back to stage 0)."""
        return self.back == 0.0 and self.shape.sampled_rows == 0.0


@dataclass(frozen=True, slots=True)
class Form:
    """One objective for pipelines of `min_stages` to `max_stages` stages."""

    kind: str
    terms: tuple[Term, ...]
    add_weight: float  # combine = max or sum of add_weight * A and peak_weight * M
    peak_weight: float
    use_max: bool = False
    stage_penalty: float = 0.0
    min_stages: int = 1
    max_stages: int = 10**6

    def combine(self, add: float, peak: float) -> float:
        """The objective's value."""
        a, m = self.add_weight * add, self.peak_weight * peak
        return max(a, m) if self.use_max else a + m

    def add_limit(self, value: float, peak: float) -> float:
        """The largest A with which `combine(A, M >= peak)` is still below `value`; -inf where none is."""
        m = self.peak_weight * peak
        if self.add_weight == 0 or (self.use_max and m >= value):
            return -math.inf if m >= value else math.inf
        return value / self.add_weight if self.use_max else (value - m) / self.add_weight


def _typical_chunk(workload: Workload) -> StepShape:
    chunk = min(workload.prefill_chunk_tokens, max(1, workload.prompt_tokens))
    return StepShape.prefill(chunk, max(0.0, (workload.prompt_tokens - chunk) / 2))


@dataclass(frozen=True, slots=True)
class _Decoding:
    """One decode step: its shape, the tokens that come out for each session, what drafting costs on stage 0."""

    shape: StepShape
    tokens: float
    draft_s: float

    @staticmethod
    def of(workload: Workload, rows: int, draft: Speculation | None) -> _Decoding:
        if draft is None:
            return _Decoding(StepShape.decode(rows, workload.mean_context_tokens), 1.0, 0.0)
        shape = StepShape.verify(rows, draft.draft_tokens, workload.mean_context_tokens)
        tokens = speculation_tokens(draft.acceptance, draft.draft_tokens)
        return _Decoding(shape, tokens, rows * draft.draft_tokens * draft.draft_token_s)

    def term(self, add: float, peak: float) -> Term:
        """The step as a term, per token."""
        return Term(self.shape, add / self.tokens, peak / self.tokens, add / self.tokens, self.draft_s)


def _latency(workload: Workload, draft: Speculation | None) -> Form:
    decode = _Decoding.of(workload, 1, draft).term(max(0, workload.output_tokens - 1), 0.0)
    chunk = Term(_typical_chunk(workload), 1.0, 1.0, 0.0)
    return Form("latency", (decode, chunk), 1.0, workload.num_prefill_chunks - 1.0)


def _fit(workload: Workload, draft: Speculation | None) -> Form:
    chunks = workload.num_prefill_chunks / max(1, workload.output_tokens)
    terms = (_Decoding.of(workload, 1, draft).term(1.0, 0.0), Term(_typical_chunk(workload), chunks, 0.0, 0.0))
    return Form("fit", terms, 1.0, 0.0, stage_penalty=FIT_PENALTY_S)


def _steady(workload: Workload, objective: Objective, rows: int, stages: tuple[int, int], draft: Speculation | None) -> Form:
    users, output = workload.num_users, max(1, workload.output_tokens)
    groups = math.ceil(users / rows)
    terms = (
        _Decoding.of(workload, rows, draft).term(1.0, groups / users),
        Term(_typical_chunk(workload), 1.0 / output, workload.num_prefill_chunks / output, 0.0),
    )
    if objective.kind == "throughput":
        return Form("throughput", terms, 1.0 / users, 1.0, True, 0.0, *stages)
    weight = objective.weight
    return Form("weighted", terms, weight, (1.0 - weight) * users, False, 0.0, *stages)


def objective_forms(workload: Workload, objective: Objective, max_stages: int, draft: Speculation | None = None) -> list[Form]:
    """The forms of an objective; several where the rows that are merged depend on the number of stages."""
    if objective.kind == "latency":
        return [_latency(workload, draft)]
    if objective.kind == "fit":
        return [_fit(workload, draft)]
    if objective.kind == "bottleneck":
        return [Form("bottleneck", (_Decoding.of(workload, 1, draft).term(0.0, 1.0),), 0.0, 1.0)]
    forms: list[Form] = []
    stages = 1
    while stages <= max_stages:
        rows = batch_rows(workload.num_users, stages)
        last = stages
        while last < max_stages and batch_rows(workload.num_users, last + 1) == rows:
            last += 1
        forms.append(_steady(workload, objective, rows, (stages, last), draft))
        stages = last + 1
    return forms


def form_for(workload: Workload, objective: Objective, num_stages: int, draft: Speculation | None = None) -> Form:
    """The form that counts for a pipeline of `num_stages`."""
    for form in objective_forms(workload, objective, num_stages, draft):
        if form.min_stages <= num_stages <= form.max_stages:
            return form
    raise AssertionError("objective_forms covers every number of stages")
