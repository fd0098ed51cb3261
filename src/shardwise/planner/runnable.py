"""What of a plan the runtime can carry out, and in which words it says no.

In: a plan, or the JSON of one. Out: what stands in the way, in words. **Fails with** `UsageError` in `require_one_pipeline`.
**Called by** `find_plan` (each plan and alternative says whether it runs) and by the commands that take `--plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import UsageError
from shardwise.planner.types import RUNNABLE_STRATEGIES, Alternative, Plan

RUNNABLE_WIRE_DTYPES = ("f32", "f16")


def obstacles(strategy: str, wire_dtype: str, *, drafts: bool) -> tuple[str, ...]:
    """Why no command runs it; nothing where one does."""
    found = []
    if strategy not in RUNNABLE_STRATEGIES:
        found.append(f"'{strategy}' is planned by rules of thumb only: the runtime splits by layers")
    if wire_dtype not in RUNNABLE_WIRE_DTYPES:
        found.append(f"the runtime sends {' or '.join(RUNNABLE_WIRE_DTYPES)}, not {wire_dtype}")
    if drafts:
        found.append("the runtime drafts no tokens")
    return tuple(found)


def plan_obstacles(plan: Plan) -> tuple[str, ...]:
    """`obstacles` of a plan."""
    return obstacles(plan.strategy, plan.wire_dtype, drafts=plan.speculation is not None)


def plan_note(plan: Plan) -> str:
    """What `run --plan` would say to it, and what runs instead; empty where it runs as it is."""
    against = plan_obstacles(plan)
    if not against and plan.replicas > 1:
        return f"each of the {plan.replicas} replicas is a deployment of its own: start one for each"
    if not against:
        return ""
    instead = next((a for a in plan.alternatives if a.runnable), None)
    return f"planned only, not run: {'; '.join(against)}. {_instead(instead)}"


def _instead(option: Alternative | None) -> str:
    if option is None:
        return "No plan that was looked at runs"
    rate = f"{option.decode_tokens_per_s:.2f} tokens/s for each user"
    return f"The best that runs: {option.strategy} on {', '.join(option.nodes)}, {rate}"


def require_one_pipeline(document: Mapping[str, Any], where: str) -> None:
    """`UsageError` for the JSON of a plan that one command cannot carry out."""
    against = obstacles(
        str(document.get("strategy", "layer_wise")),
        str(document.get("wire_dtype", "f32")),
        drafts=document.get("speculation") is not None,
    )
    if against:
        hint = "plan again without --strategy, --wire-dtype and --draft: it then chooses from what runs"
        raise UsageError(f"this plan cannot be run: {'; '.join(against)}", where=where, hint=hint)
    replicas = document.get("replicas", 1)
    if replicas != 1:
        hint = "plan with --strategy single_node,layer_wise, or start each replica by itself with --layers and --nodes"
        raise UsageError(f"the plan has {replicas} replicas, one command starts one pipeline", where=where, hint=hint)
