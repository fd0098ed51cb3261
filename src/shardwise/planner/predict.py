"""What a plan will do, before it runs: the numbers that `run --json` prints under "predicted".

In: a request and a plan. Out: a `Prediction`. First-token time, gaps and throughput come from the seeded event
simulation of `cost_tails` over the step times of the cost model, so that queueing and jitter are in them. Fails with
`UsageError` when the plan names a node, device or link that the cluster does not have.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.planner.cost_compute import StepShape
from shardwise.planner.cost_links import activation_bytes, cold_start_s, message_overhead_s, token_bytes, transfer_s
from shardwise.planner.cost_memory import HOST_EMBEDDING, mapped_bytes
from shardwise.planner.cost_model import DEFAULT_COSTS, CostModel
from shardwise.planner.cost_pipeline import (
    batch_rows,
    pipeline_availability,
    replicated_availability,
    speculation_tokens,
)
from shardwise.planner.cost_rates import RuntimeCosts
from shardwise.planner.cost_tails import HopTiming, RingSamples, RingTiming, quantile, simulate_ring
from shardwise.planner.types import (
    BoundaryPrediction,
    Percentiles,
    Plan,
    PlanRequest,
    Prediction,
    StageAssignment,
    StageCompute,
    StagePrediction,
    TensorShape,
)

_MAX_SIMULATED_STEPS = 12_000  # rows times stages; longer runs are extrapolated from their steady state
_DRIVER_MESSAGES = 2  # the request to stage 0, the first token back


def predict(request: PlanRequest, plan: Plan, costs: RuntimeCosts = DEFAULT_COSTS) -> Prediction:
    """Seconds, rates and bytes of `plan` for the request's workload."""
    return predict_with(CostModel(request, costs), plan)


def predict_with(model: CostModel, plan: Plan) -> Prediction:
    """The same, with a cost model that is there already."""
    pipelines = plan.pipelines
    users = split_users(model.workload.num_users, len(pipelines))
    runs = [_Run.of(model, plan, stages, count) for stages, count in zip(pipelines, users) if count]
    gaps = sorted(g for run in runs for g in run.gaps_s)
    first = [t for run in runs for t in run.first_token_s]
    workload = model.workload
    ttft_s = quantile(first, 0.5)
    tpot_s = sum(gaps) / len(gaps) if gaps else 0.0
    lead = runs[0]
    boundaries = lead.boundaries()
    return Prediction(
        time_to_first_token_s=ttft_s,
        inter_token_s=Percentiles(p50=quantile(gaps, 0.5), p95=quantile(gaps, 0.95), p99=quantile(gaps, 0.99)),
        decode_tokens_per_s=1.0 / tpot_s if tpot_s else 0.0,
        prefill_tokens_per_s=workload.prompt_tokens / ttft_s if ttft_s else 0.0,
        aggregate_tokens_per_s=sum(run.tokens_per_s for run in runs),
        time_per_output_token_s=tpot_s,
        request_s=ttft_s + max(0, workload.output_tokens - 1) * tpot_s,
        stages=lead.stages(),
        boundaries=boundaries,
        bottleneck=lead.bottleneck(boundaries),
        communication_share=sum(b.share_of_token for b in boundaries) + lead.sync_s / lead.round_trip_s,
        availability=plan_availability(model, plan),
        sync_s=lead.sync_s,
    )


def split_users(num_users: int, replicas: int) -> list[int]:
    """Users of each replica, as even as can be."""
    base, extra = divmod(num_users, replicas)
    return [base + (1 if index < extra else 0) for index in range(replicas)]


def plan_availability(model: CostModel, plan: Plan) -> float:
    """Chance that at least one replica has all its machines."""
    up = []
    for stages in plan.pipelines:
        nodes = {r.node for stage in (*stages, *plan.prefill_stages) for r in stage.ranks}
        up.append(pipeline_availability(model.cluster.node(name).availability for name in nodes))
    return up[0] if len(up) == 1 else replicated_availability(up)


def prefill_chunks(prompt_tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """(position, tokens) of each chunk of a prompt."""
    chunk = max(1, chunk_tokens)
    total = max(1, prompt_tokens)
    return [(p, min(chunk, total - p)) for p in range(0, total, chunk)]


@dataclass(slots=True)
class _Run:
    """One pipeline, timed and simulated."""

    model: CostModel
    plan: Plan
    pipeline: tuple[StageAssignment, ...]
    timing: RingTiming
    samples: RingSamples
    step_s: list[float]  # one decode row, per stage
    sync_s: float
    tokens_per_step: float
    gaps_s: list[float]
    first_token_s: list[float]
    tokens_per_s: float

    @staticmethod
    def of(model: CostModel, plan: Plan, stages: tuple[StageAssignment, ...], users: int) -> _Run:
        """Time every step, then simulate `users` sessions."""
        timing, step_s, sync_s = _timing(model, plan, stages, users)
        output = max(1, model.workload.output_tokens)
        tokens = (
            1.0 if plan.speculation is None else speculation_tokens(plan.speculation.acceptance, plan.speculation.draft_tokens)
        )
        steps = max(2, round((output - 1) / tokens) + 1) if output > 1 else 1
        simulated = min(steps, max(12, _MAX_SIMULATED_STEPS // max(1, users * len(stages))))
        starts_s = _handed_over_s(model, plan, users) if plan.prefill_stages else None
        samples = simulate_ring(timing, users, simulated, model.request.seed, starts_s)
        samples.first_token_s = samples.first_token_s if starts_s is None else starts_s
        samples.finished_s = max(samples.finished_s, max(samples.first_token_s, default=0.0))
        mean_gap = sum(samples.gaps_s) / len(samples.gaps_s) if samples.gaps_s else 0.0
        wall_s = samples.finished_s + (steps - simulated) * mean_gap
        last = timing.hops[-1]  # the driver sits beside stage 0: a token reaches it the way it reaches stage 0
        driver_s = _DRIVER_MESSAGES * model.costs.message_overhead_s + last.base_s + last.row_s + last.latency_s
        return _Run(
            model,
            plan,
            stages,
            timing,
            samples,
            step_s,
            sync_s,
            tokens,
            [gap / tokens for gap in samples.gaps_s],
            [t + driver_s for t in samples.first_token_s],
            users * output / (wall_s + driver_s) if wall_s else 0.0,
        )

    @property
    def names(self) -> list[str]:
        return [stage.node for stage in self.pipeline]

    @property
    def round_trip_s(self) -> float:
        """Seconds of one row through the whole ring, without waiting."""
        hops = self.timing.hops if len(self.pipeline) > 1 else []
        return sum(self.step_s) + sum(h.base_s + h.row_s + h.latency_s for h in hops)

    def mapped_bytes(self, stage: StageAssignment) -> int:
        """Of what was counted: bytes that stay on disk."""
        lead = stage.ranks[0]
        counted = len(stage.ranks) > 1 or self.model.unit(lead.node, lead.device).device.kind not in HOST_EMBEDDING
        return mapped_bytes(self.model.model, *stage.layers) if counted else 0

    def stages(self) -> tuple[StagePrediction, ...]:
        """Per stage, under the names of `run --json`."""
        out = []
        wall_s = max(self.samples.finished_s, 1e-12)
        for index, stage in enumerate(self.pipeline):
            steps, waits = self.samples.stage_steps_s[index], self.samples.waits_s[index]
            ranks = stage.ranks
            out.append(
                StagePrediction(
                    node=stage.node,
                    layers=stage.layers,
                    weight_bytes=sum(r.weight_bytes for r in ranks),
                    kv_bytes=sum(r.kv_bytes for r in ranks),
                    peak_memory_bytes=sum(r.total_bytes for r in ranks) - self.mapped_bytes(stage),
                    compute_s=StageCompute(
                        prefill_total=sum(self.timing.chunk_s[index]),
                        decode_p50=quantile(steps, 0.5) if steps else self.step_s[index],
                        decode_p95=quantile(steps, 0.95) if steps else self.step_s[index],
                    ),
                    wait_s=Percentiles(p50=quantile(waits, 0.5), p95=quantile(waits, 0.95), p99=quantile(waits, 0.99)),
                    utilization=min(1.0, self.samples.busy_s[index] / wall_s),
                    paging=any(r.total_bytes > self.model.unit(r.node, r.device).device.memory_bytes for r in ranks),
                )
            )
        return tuple(out)

    def boundaries(self) -> tuple[BoundaryPrediction, ...]:
        """Per hop of the ring; none where one stage holds everything."""
        if len(self.pipeline) == 1:
            return ()
        names, hidden = self.names, self.model.model.hidden_size
        out = []
        for index, (source, target) in enumerate(zip(names, [*names[1:], names[0]])):
            hop, back = self.timing.hops[index], index == len(names) - 1
            delays, waits = self.samples.hop_delays_s[index], self.samples.waits_s[(index + 1) % len(names)]
            alone_s = hop.base_s + hop.row_s + hop.latency_s
            tensor = TensorShape(shape=(1,), dtype="i32") if back else TensorShape(shape=(1, hidden), dtype=self.plan.wire_dtype)
            costs = self.model.costs
            num_bytes = token_bytes(1, costs) if back else activation_bytes(hidden, 1, self.plan.wire_dtype, costs)
            out.append(
                BoundaryPrediction(
                    source=source,
                    target=target,
                    tensor=tensor,
                    bytes_per_token=num_bytes - costs.header_bytes,
                    transfer_s=Percentiles(
                        p50=quantile(delays, 0.5) or alone_s,
                        p95=quantile(delays, 0.95) or alone_s,
                        p99=quantile(delays, 0.99) or alone_s,
                    ),
                    copy_s=Percentiles(p50=num_bytes / costs.local_bytes_per_s, p95=num_bytes / costs.local_bytes_per_s),
                    sync_wait_s=Percentiles(p50=quantile(waits, 0.5), p95=quantile(waits, 0.95)),
                    prefill_transfer_s=0.0 if back else hop.chunk_s + hop.latency_s,
                    share_of_token=alone_s / self.round_trip_s,
                )
            )
        return tuple(out)

    def bottleneck(self, boundaries: tuple[BoundaryPrediction, ...]) -> str:
        """The stage or hop that takes the largest part of a token."""
        best, name = -1.0, ""
        for index, seconds in enumerate(self.step_s):
            if seconds > best:
                best, name = seconds, f"stage {index} ({self.names[index]})"
        for boundary in boundaries:
            if boundary.share_of_token * self.round_trip_s > best:
                best = boundary.share_of_token * self.round_trip_s
                name = f"link {boundary.source} -> {boundary.target}"
        return name


def _timing(
    model: CostModel, plan: Plan, stages: tuple[StageAssignment, ...], users: int
) -> tuple[RingTiming, list[float], float]:
    """Seconds of every step and hop; also one decode row per stage, and the syncs of one token."""
    workload = model.workload
    merge = batch_rows(users, len(stages))
    draft = plan.speculation
    decode, single, sync_total = [], [], 0.0
    for index, stage in enumerate(stages):
        times: list[float] = []
        for rows in range(1, merge + 1):
            if draft is None:
                shape = StepShape.decode(rows, workload.mean_context_tokens)
            else:
                shape = StepShape.verify(rows, draft.draft_tokens, workload.mean_context_tokens)
            seconds, sync = model.stage_step_s(stage, shape)
            if draft is not None and index == 0:
                seconds += rows * draft.draft_tokens * draft.draft_token_s
            times.append(min(seconds, rows * times[0]) if times else seconds)  # a stage learns which is faster
            sync_total += sync if rows == 1 else 0.0
        decode.append(times)
        single.append(times[0])
    chunk_s = [[0.0]] * len(stages) if plan.prefill_stages else _chunk_times(model, stages)
    hops = _hops(model, plan, stages, 1 if draft is None else draft.draft_tokens + 1)
    groups, room = _shared_cores(model, stages)
    costs = model.costs
    beside = (costs.shared_speed, costs.message_cpu_s, costs.driver_cpu_s)
    timing = RingTiming(decode, chunk_s, hops, merge, costs.service_jitter, groups, room, *beside)
    return timing, single, sync_total


def _shared_cores(model: CostModel, stages: tuple[StageAssignment, ...]) -> tuple[list[int], float]:
    """Which stages share a machine's cores, and for how many computing ones there is room (0 = for all)."""
    nodes = [model.cluster.node(stage.node) for stage in stages]
    names = list(dict.fromkeys(node.machine for node in nodes if node.machine))
    groups = [names.index(node.machine) if node.machine else -1 for node in nodes]
    cores = min((node.num_cores for node in nodes if node.machine and node.num_cores), default=0)
    return groups, cores / max(1, model.costs.stage_threads)


def _chunk_times(model: CostModel, stages: tuple[StageAssignment, ...]) -> list[list[float]]:
    """[stage][chunk] seconds of one prompt."""
    chunks = prefill_chunks(model.workload.prompt_tokens, model.workload.prefill_chunk_tokens)
    last = max(1, model.workload.prompt_tokens)
    shapes = [StepShape.prefill(tokens, at, last=at + tokens >= last) for at, tokens in chunks]
    return [[model.stage_step_s(stage, shape)[0] for shape in shapes] for stage in stages]


def _handed_over_s(model: CostModel, plan: Plan, users: int) -> list[float]:
    """When each session reaches the decode pipeline: prompts read by the prefill pipeline, KV sent over.

    KV of the prompt goes layer range by layer range to its new holder; the largest transfer counts (DistServe, Zhong
    2024; Splitwise, Patel 2024).
    """
    chunk_s = _chunk_times(model, plan.prefill_stages)
    hops = _hops(model, plan, plan.prefill_stages, 1)
    timing = RingTiming([[0.0]] * len(chunk_s), chunk_s, hops, 1, model.costs.service_jitter)
    first = sorted(simulate_ring(timing, users, 1, model.request.seed).first_token_s)
    handed_s = handover_s(model, plan)
    return [t + handed_s for t in first]


def handover_s(model: CostModel, plan: Plan) -> float:
    """Seconds until the KV of a prompt has reached the decode pipeline; the largest transfer counts (DistServe 2024)."""
    longest = 0.0
    for source in plan.prefill_stages:
        for target in plan.stages:
            low, high = max(source.layers[0], target.layers[0]), min(source.layers[1], target.layers[1])
            if low < high and source.node != target.node:
                tokens = model.workload.prompt_tokens
                size = tokens * model.model.kv_bytes_per_token(low, high, model.workload.kv_type)
                longest = max(longest, transfer_s(model.link(source.node, target.node), size, model.costs))
    return longest


def _hops(model: CostModel, plan: Plan, stages: tuple[StageAssignment, ...], rows_per_session: int) -> list[HopTiming]:
    """The ring's hops; with one stage the token stays where it is."""
    if len(stages) == 1:
        return [HopTiming(0.0, 0.0, 0.0, 0.0, 0.0)]
    hidden, costs = model.model.hidden_size, model.costs
    names = [stage.node for stage in stages]
    chunk = min(model.workload.prefill_chunk_tokens, max(1, model.workload.prompt_tokens))
    chunk_bytes = activation_bytes(hidden, chunk, plan.wire_dtype, costs)
    out = []
    for index, (source, target) in enumerate(zip(names, [*names[1:], names[0]])):
        link = model.link(source, target)
        back = index == len(names) - 1
        jitter = link.jitter_p95_s.value if link.jitter_p95_s else 0.0
        row_bytes = costs.token_bytes if back else activation_bytes(hidden, 1, plan.wire_dtype, costs) - costs.header_bytes
        out.append(
            HopTiming(
                base_s=message_overhead_s(link, costs) + costs.header_bytes / link.bytes_per_s.value,
                row_s=rows_per_session * row_bytes / link.bytes_per_s.value,
                chunk_s=transfer_s(link, chunk_bytes, costs) - link.latency_s.value,
                latency_s=link.latency_s.value,
                jitter_p95_s=jitter,
                cold_s=0.0
                if back or model.workload.warm
                else cold_start_s(link, activation_bytes(hidden, chunk, plan.wire_dtype, costs)),
            )
        )
    return out
