"""What each recovery policy costs and saves, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from shardwise.cli.common import Output
from shardwise.session.policy_costs import PolicyCost
from shardwise.units import format_bytes, format_duration


def show_policies(out: Output, costs: Sequence[PolicyCost]) -> None:
    """Nothing where there are no stages that could be lost."""
    if costs:
        out.show(policy_table(costs))


def policy_table(costs: Sequence[PolicyCost]) -> Table:
    """A row a policy: memory on each machine, the stall when a stage is lost at the worst moment, and what that saves."""
    table = Table(title="If a stage is lost, at worst", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("policy", "more memory", "killed", "silent", "saves", ""):
        table.add_column(name)
    for cost in costs:
        where = ", ".join(f"{one.node} {format_bytes(one.extra_bytes)}" for one in cost.memory) or "none"
        short = ", ".join(f"{one.node} lacks {format_bytes(one.short_by_bytes)}" for one in cost.memory if one.short_by_bytes)
        twice = "computes twice" if cost.compute_factor > 1 else ""
        table.add_row(
            cost.policy,
            escape(where),
            format_duration(cost.stall.killed_s),
            format_duration(cost.stall.silent_s),
            format_duration(cost.saves_s) if cost.saves_s else "",
            escape("; ".join(part for part in (short, twice, cost.flags) if part)),
        )
    return table
