"""What each recovery policy costs and saves, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from shardwise.cli.common import Output
from shardwise.cli.plan_view import plain_table
from shardwise.session.policy_costs import NodeBytes, PolicyCost
from shardwise.units import format_bytes, format_duration


def show_policies(out: Output, costs: Sequence[PolicyCost]) -> None:
    """Nothing where there are no stages that could be lost."""
    if costs:
        out.show(policy_table(costs))


def policy_table(costs: Sequence[PolicyCost]) -> Table:
    """A row a policy: memory on each machine, the stall when a stage is lost at the worst moment, and what that saves."""
    table = plain_table("If a stage is lost, at worst")
    table.add_column("policy", no_wrap=True)
    table.add_column("more memory", overflow="fold")
    for name in ("killed", "silent", "saves", "flags"):
        table.add_column(name, no_wrap=True)
    for cost in costs:
        where = [_memory(one) for one in cost.memory] or ["none"]
        table.add_row(
            cost.policy,
            escape(", ".join(where) + ("; computes twice" if cost.compute_factor > 1 else "")),
            format_duration(cost.stall.killed_s),
            format_duration(cost.stall.silent_s),
            format_duration(cost.saves_s) if cost.saves_s else "",
            escape(cost.flags),
        )
    return table


def _memory(one: NodeBytes) -> str:
    lacks = f" (lacks {format_bytes(one.short_by_bytes)})" if one.short_by_bytes else ""
    return f"{one.node} {format_bytes(one.extra_bytes)}{lacks}"
