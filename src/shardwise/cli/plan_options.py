"""The flags that `plan` and `advise` share, and the request they make."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.errors import UsageError

if TYPE_CHECKING:
    from shardwise.planner import Limits, PlanRequest, Speculation

WORK, LIMITS, CHOICE = "Workload", "Limits", "What may be chosen"

Model = Annotated[str, typer.Argument(help="sample, a .gguf file, a folder, hf:org/repo, or a preset.", metavar="MODEL")]
Cluster = Annotated[Path | None, typer.Option("--cluster", "-C", help="The cluster file.", metavar="FILE")]
Prompt = Annotated[int, typer.Option("--prompt-tokens", help="Tokens of a prompt.", rich_help_panel=WORK)]
Tokens = Annotated[int, typer.Option("--output-tokens", help="Tokens of an answer.", rich_help_panel=WORK)]
Users = Annotated[int, typer.Option("--users", help="Sessions at the same time.", rich_help_panel=WORK)]
Ctx = Annotated[int, typer.Option("--ctx", "-c", help="Context kept for a session; 0 = as needed.", rich_help_panel=WORK)]
KvType = Annotated[str, typer.Option("--kv-type", help="Type of the KV cache.", rich_help_panel=WORK)]
Chunk = Annotated[int, typer.Option("--chunk-tokens", help="Rows of a prefill chunk.", rich_help_panel=WORK)]
Kind = Annotated[str, typer.Option("--objective", "-O", help="latency, throughput, bottleneck, fit or weighted.")]
Weight = Annotated[float, typer.Option("--weight", help="For weighted: share of latency, 0 to 1.")]
FirstToken = Annotated[str, typer.Option("--max-first-token", help="e.g. '5 s'.", rich_help_panel=LIMITS)]
P95 = Annotated[str, typer.Option("--max-p95", help="Between tokens, e.g. '300 ms'.", rich_help_panel=LIMITS)]
Rate = Annotated[float, typer.Option("--min-rate", help="Tokens/s of each user; 0 = any.", rich_help_panel=LIMITS)]
Up = Annotated[float, typer.Option("--min-availability", help="Share of the time; 0 = any.", rich_help_panel=LIMITS)]
MaxStages = Annotated[int, typer.Option("--max-stages", help="0 = any number.", rich_help_panel=LIMITS)]
Share = Annotated[float, typer.Option("--memory-fraction", help="Of each memory.", rich_help_panel=LIMITS)]
WireDtype = Annotated[str, typer.Option("--wire-dtype", help="f32, f16, ... or several with commas.", rich_help_panel=CHOICE)]
Strategies = Annotated[
    str, typer.Option("--strategy", help="With commas; 'any' for all; empty = what 'run' executes.", rich_help_panel=CHOICE)
]
Draft = Annotated[str, typer.Option("--draft", help="TOKENS:ACCEPTANCE:TIME a token, e.g. 4:0.7:'5 ms'.", rich_help_panel=CHOICE)]
Best = Annotated[bool, typer.Option("--best", help="The best plan, even where a simpler one is within a few per cent.")]
TimeLimit = Annotated[float, typer.Option("--time-limit", help="Seconds of search at most, about.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the simulated jitter.")]


def plan_request(
    model: str,
    cluster: Path | None,
    *,
    prompt_tokens: int,
    output_tokens: int,
    users: int,
    ctx: int,
    kv_type: str,
    chunk_tokens: int,
    objective: str,
    weight: float,
    limits: Limits,
    wire_dtype: str,
    strategy: str,
    draft: str,
    time_limit: float,
    seed: int,
) -> PlanRequest:
    """Read model and cluster, and put the question together."""
    from shardwise.machines import load_cluster
    from shardwise.model import describe_model
    from shardwise.planner import Objective, PlanRequest, Workload
    from shardwise.planner.types import RUNNABLE_STRATEGIES, STRATEGIES

    if cluster is None:
        raise UsageError(
            "no cluster file was named", hint="--cluster FILE; 'shardwise probe --out FILE' writes one", field="cluster"
        )
    chosen = STRATEGIES if strategy == "any" else _words(strategy) or RUNNABLE_STRATEGIES
    return PlanRequest(
        model=describe_model(model),
        cluster=load_cluster(cluster),
        workload=Workload(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            num_users=users,
            context_tokens=ctx or None,
            kv_type=kv_type,
            prefill_chunk_tokens=chunk_tokens,
        ),
        objective=Objective(kind=objective, weight=weight),
        limits=limits,
        strategies=chosen,
        wire_dtypes=_words(wire_dtype),
        speculation=_draft(draft),
        time_limit_s=time_limit,
        seed=seed,
    )


def plan_limits(first_token: str, p95: str, rate: float, up: float, stages: int, share: float) -> Limits:
    """`Limits` from flags; empty and 0 mean none."""
    from shardwise.planner import Limits
    from shardwise.units import parse_duration

    return Limits(
        memory_fraction=share,
        max_time_to_first_token_s=parse_duration(first_token, field="--max-first-token") if first_token else None,
        max_inter_token_p95_s=parse_duration(p95, field="--max-p95") if p95 else None,
        min_decode_tokens_per_s=rate or None,
        min_availability=up or None,
        max_stages=stages or None,
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _draft(text: str) -> tuple[Speculation, ...]:
    from shardwise.planner import Speculation
    from shardwise.units import parse_duration

    if not text:
        return ()
    parts = text.split(":")
    try:
        tokens, acceptance, time = int(parts[0]), float(parts[1]), parse_duration(parts[2], field="--draft")
    except (IndexError, ValueError) as error:
        raise UsageError(f"--draft {text}", hint="TOKENS:ACCEPTANCE:TIME, e.g. 4:0.7:5ms", field="draft") from error
    if tokens < 1 or not 0 <= acceptance <= 1:
        raise UsageError(f"--draft {text}", hint="at least 1 token, acceptance 0 to 1", field="draft")
    return (Speculation(draft_tokens=tokens, acceptance=acceptance, draft_token_s=time),)
