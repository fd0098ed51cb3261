"""`shardwise plan MODEL --cluster C`: the best plan, its predictions, alternatives, rejections with reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli import plan_options as o
from shardwise.cli.common import output


def plan(
    model: o.Model,
    cluster: o.Cluster = None,
    prompt_tokens: o.Prompt = 512,
    output_tokens: o.Tokens = 128,
    users: o.Users = 1,
    ctx: o.Ctx = 0,
    kv_type: o.KvType = "f16",
    chunk_tokens: o.Chunk = 64,
    objective: o.Kind = "latency",
    weight: o.Weight = 0.5,
    max_first_token: o.FirstToken = "",
    max_p95: o.P95 = "",
    min_rate: o.Rate = 0.0,
    min_availability: o.Up = 0.0,
    max_stages: o.MaxStages = 0,
    memory_fraction: o.Share = 1.0,
    wire_dtype: o.WireDtype = "f32",
    strategy: o.Strategies = "",
    draft: o.Draft = "",
    time_limit: o.TimeLimit = 20.0,
    seed: o.Seed = 0,
    best: o.Best = False,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the plan here, for 'run --plan'.")] = None,
) -> None:
    """The plan that is advised, its predictions, alternatives, rejections with reasons."""
    from shardwise.cli.plan_view import show_plan
    from shardwise.cli.policy_view import show_policies
    from shardwise.planner import find_plan, smaller_quantizations
    from shardwise.planner.plan_file import write_plan
    from shardwise.records import plain
    from shardwise.session.policy_costs import policy_costs

    request = o.plan_request(
        model,
        cluster,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        users=users,
        ctx=ctx,
        kv_type=kv_type,
        chunk_tokens=chunk_tokens,
        objective=objective,
        weight=weight,
        limits=o.plan_limits(max_first_token, max_p95, min_rate, min_availability, max_stages, memory_fraction),
        wire_dtype=wire_dtype,
        strategy=strategy,
        draft=draft,
        time_limit=time_limit,
        seed=seed,
    )
    found = find_plan(request, smaller=smaller_quantizations(request.model), as_advised=not best)
    if out is not None:
        write_plan(found, out)
    if output().json:
        output().document(plain(found) | {"policies": plain(policy_costs(request, found))})
    else:
        show_plan(output(), request, found)
        show_policies(output(), policy_costs(request, found))
