"""`shardwise advise MODEL --cluster C`: should it be split at all? Verdict first, then the numbers behind it."""

from __future__ import annotations

import typer

from shardwise.cli import plan_options as o
from shardwise.cli.common import output


def advise(
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
) -> None:
    """Should the model be split at all? Exit 3 when there is no plan at all; the verdict is printed all the same."""
    from shardwise.cli.plan_view import show_advice, show_plan, show_rejections
    from shardwise.cli.policy_view import show_policies
    from shardwise.planner import consult, smaller_quantizations
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
    found, advice, rejections = consult(request, lambda: smaller_quantizations(request.model), as_advised=not best)
    out = output()
    if out.json:
        nothing = {"strategy": None, "stages": [], "advice": plain(advice), "rejections": plain(rejections)}
        out.document(plain(found) | {"policies": plain(policy_costs(request, found))} if found is not None else nothing)
    else:
        show_advice(out, advice)
        if found is None and all(reason.case != "nothing_fits" for reason in advice.reasons):
            show_rejections(out, rejections)
        if found is not None:
            show_plan(out, request, found, with_advice=False)
            show_policies(out, policy_costs(request, found))
    if found is None:
        raise typer.Exit(3)
