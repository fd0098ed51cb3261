"""A plan for people: verdict, the pipeline with its link times, a bar for every memory, predictions, alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from shardwise.cli.common import Output
from shardwise.planner import Advice, Plan, PlanRequest, Prediction, Rejection, StageAssignment
from shardwise.units import format_bytes, format_duration

_BAR = 24
_SHOWN_REPLICAS = 4


def show_plan(out: Output, request: PlanRequest, plan: Plan, *, with_advice: bool = True) -> None:
    """Everything about one plan."""
    predicted = plan.predicted
    assert predicted is not None
    if with_advice and plan.advice is not None:
        show_advice(out, plan.advice)
    proof = (
        "proven the best"
        if plan.optimal
        else f"at most {plan.gap:.1%} from the best"
        if plan.gap is not None
        else "heuristic, no proof"
    )
    copies = f", {plan.replicas} replicas" if plan.replicas > 1 else ""
    out.show(f"\n[bold]Plan[/bold]: {plan.strategy}{copies}, {plan.objective} ({proof}; {plan.method})")
    if plan.note:
        out.show(escape(plan.note))
    out.show(pipeline_drawing(plan.stages, predicted))
    for stages in plan.replica_stages[: _SHOWN_REPLICAS - 1]:
        out.show(pipeline_drawing(stages, None))
    if len(plan.replica_stages) >= _SHOWN_REPLICAS:
        out.show(f"... and {len(plan.replica_stages) - _SHOWN_REPLICAS + 1} more replicas")
    if plan.prefill_stages:
        out.show("prompts are read by " + pipeline_drawing(plan.prefill_stages, None))
    out.show(memory_table(plan))
    out.show(prediction_table(request, predicted))
    if plan.alternatives:
        out.show(alternative_table(plan))
    show_rejections(out, plan.rejections)


def show_rejections(out: Output, rejections: Sequence[Rejection]) -> None:
    """What cannot be, and why."""
    for rejection in rejections:
        out.show(escape(f"not on {', '.join(rejection.nodes)}: {rejection.reason}"))


def show_advice(out: Output, advice: Advice) -> None:
    """Verdict first."""
    out.show(f"[bold]{advice.verdict.replace('_', ' ').upper()}[/bold]  {escape(advice.headline)}")
    for reason in advice.reasons:
        if reason.message != advice.headline:
            out.show(escape(f"  - {reason.message}"))


def pipeline_drawing(stages: tuple[StageAssignment, ...], predicted: Prediction | None) -> str:
    """`[desktop cuda 0-19] --0.6 ms--> [nas cpu 20-31] --0.4 ms--> back`."""
    boxes = []
    for stage in stages:
        names = " + ".join(f"{r.node} {r.device}" for r in stage.ranks)
        boxes.append(escape(f"[{names}, layers {stage.layers[0]}-{stage.layers[1] - 1}]"))
    if len(boxes) == 1:
        return "  " + boxes[0]
    if predicted is None or len(predicted.boundaries) != len(boxes):
        return "  " + " --> ".join(boxes)
    times = [format_duration(b.transfer_s.p50) for b in predicted.boundaries]
    text = boxes[0]
    for name, time in zip(boxes[1:], times):
        text += f" --{time}--> {name}"
    return f"  {text} --{times[-1]}--> back"


def plain_table(title: str, **more: Any) -> Table:
    """Narrow enough for a terminal of 80 columns; words that are too long for their column are folded, never cut."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), **more)


def memory_table(plan: Plan) -> Table:
    """A bar for every rank's memory: weights #, KV =, buffers ."""
    table = plain_table("Memory (# weights, = KV, . buffers)")
    table.add_column("machine", overflow="fold")
    for name in ("layers", "used of", ""):
        table.add_column(name, no_wrap=True)
    groups = [*plan.pipelines[:_SHOWN_REPLICAS], plan.prefill_stages]
    for stage in (stage for stages in groups for stage in stages):
        for rank in stage.ranks:
            table.add_row(
                escape(f"{rank.node} {rank.device}"),
                f"{stage.layers[0]}-{stage.layers[1] - 1}" + (f" x {rank.share:.2f}" if rank.share < 1 else ""),
                f"{format_bytes(rank.total_bytes)} of {format_bytes(rank.memory_limit_bytes)}",
                escape(_bar(rank.weight_bytes, rank.kv_bytes, rank.workspace_bytes, rank.memory_limit_bytes)),
            )
    return table


def _bar(weights: int, kv: int, buffers: int, limit: int) -> str:
    marks, used, filled = "", 0, 0
    for size, mark in ((weights, "#"), (kv, "="), (buffers, ".")):
        used += size
        until = min(_BAR, round(_BAR * used / max(1, limit)))
        marks += mark * max(0, until - filled)
        filled = max(filled, until)
    return f"|{marks:<{_BAR}}|"


def prediction_table(request: PlanRequest, p: Prediction) -> Table:
    """What the plan will do."""
    work = request.workload
    table = plain_table("Prediction", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("workload", f"{work.num_users} user(s), {work.prompt_tokens} tokens in, {work.output_tokens} out")
    table.add_row("first token", f"{format_duration(p.time_to_first_token_s)} ({p.prefill_tokens_per_s:.0f} tokens/s of prompt)")
    gaps = p.inter_token_s
    table.add_row(
        "each user",
        f"{p.decode_tokens_per_s:.2f} tokens/s; between tokens p50 {format_duration(gaps.p50)}, p95 {format_duration(gaps.p95)}",
    )
    table.add_row("all users", f"{p.aggregate_tokens_per_s:.2f} tokens/s, prompts included")
    table.add_row("on the links", f"{p.communication_share:.1%} of a token")
    table.add_row("bottleneck", escape(p.bottleneck))
    if p.availability < 1:
        table.add_row("all machines up", f"{p.availability:.1%} of the time")
    return table


def alternative_table(plan: Plan) -> Table:
    """What else was considered."""
    table = plain_table("Alternatives")
    wires = any(option.wire_dtype != plan.wire_dtype for option in plan.alternatives)
    table.add_column("strategy", no_wrap=True)
    table.add_column("machines", overflow="fold", min_width=10)
    for name in ("first\ntoken", "tokens/s", "all\nusers", "objec-\ntive"):
        table.add_column(name, no_wrap=True)
    table.add_column("note", overflow="fold", min_width=10)
    for option in plan.alternatives:
        names = ", ".join(option.nodes[:6]) + (f" and {len(option.nodes) - 6} more" if len(option.nodes) > 6 else "")
        notes = ([f"wire {option.wire_dtype}"] if wires else []) + ([option.note] if option.note else [])
        table.add_row(
            option.strategy,
            escape(names),
            format_duration(option.time_to_first_token_s),
            f"{option.decode_tokens_per_s:.2f}",
            f"{option.aggregate_tokens_per_s:.2f}",
            format_duration(option.objective_value),
            escape("; ".join(notes)),
        )
    return table
