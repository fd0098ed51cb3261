"""Dry run: what a split would hold, send and leave whole, from names and shapes alone.

Data flow: model (meta is enough) + plan + shares -> `TpReport`; the planner and `shardwise describe --tp` read the same figures.
Traffic is per forward step of `rows` rows (batch x tokens), the bytes that one rank hands to the collective; a ring moves
2 (W - 1) / W of that over each link for a sum, (W - 1) / W for a gather (Patarasuk & Yuan 2009).

What can fail: whatever `resolve_plan` can fail with. `report` reports instead of raising where `check_only` is set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from shardwise.errors import UsageError
from shardwise.tp.apply import plan_of
from shardwise.tp.layout import ShardLayout
from shardwise.tp.matching import generic_name
from shardwise.tp.resolve import ModuleShard, ResolvedPlan, resolve_plan
from shardwise.units import format_bytes

_MAX_DEGREE = 16


@dataclass(frozen=True)
class Collective:
    """One kind of collective of a forward step: how often, and the bytes that a rank hands over in total."""

    kind: str
    count: int
    bytes_per_step: int


@dataclass(frozen=True)
class TpReport:
    """See the module docstring. Bytes are of parameters and persistent buffers, in the model's own types."""

    degree: int
    shares: tuple[float, ...] | None
    bytes_per_rank: tuple[int, ...]
    replicated_bytes: int
    full_bytes: int
    rules: Mapping[str, Mapping[str, Any]]
    implied: tuple[str, ...]
    unmatched_rules: tuple[str, ...]
    unmatched_parameters: tuple[str, ...]
    valid_degrees: tuple[int, ...]
    rows: int
    collectives: tuple[Collective, ...]
    bytes_per_step: int
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        out = [f"tensor parallel over {self.degree} rank(s)" + (f", shares {list(self.shares)}" if self.shares else "")]
        out += [f"  rank {rank}: {format_bytes(size)}" for rank, size in enumerate(self.bytes_per_rank)]
        out.append(f"  of which every rank: {format_bytes(self.replicated_bytes)}")
        out.append(f"  unsharded: {format_bytes(self.full_bytes)}; degrees that split evenly: {list(self.valid_degrees)}")
        for collective in self.collectives:
            sent = format_bytes(collective.bytes_per_step)
            out.append(f"  {collective.kind} x {collective.count}: {sent} a step of {self.rows} row(s)")
        for rule, facts in self.rules.items():
            out.append(f"  {rule}: {facts['style']} on {facts['modules']} module(s)")
        out += [f"  follows: {path}" for path in self.implied]
        out += [f"  rule without a match: {rule}" for rule in self.unmatched_rules]
        out += [f"  held whole: {name}" for name in self.unmatched_parameters]
        return out + [f"  note: {note}" for note in self.notes]


def report(
    model: nn.Module,
    plan: Mapping[str, Any] | None = None,
    shares: Sequence[float] | None = None,
    *,
    degree: int | None = None,
    rows: int = 1,
) -> TpReport:
    """What splitting `model` by `plan` (None: its own) would mean. degree: number of ranks where no shares are given (2)."""
    rules = plan_of(model) if plan is None else dict(plan)
    ranks = len(shares) if shares is not None else degree or 2
    resolved = resolve_plan(model, rules, ranks, shares, strict=False)
    layouts = _layouts(model, resolved)
    sizes = tuple(sum(layout.local_numel(rank) * width for layout, width in layouts.values()) for rank in range(ranks))
    whole = {name: (layout, width) for name, (layout, width) in layouts.items() if layout.dim is None}
    collectives = traffic(model, resolved, rows)
    return TpReport(
        degree=ranks,
        shares=resolved.shares,
        bytes_per_rank=sizes,
        replicated_bytes=sum(torch.Size(layout.shape).numel() * width for layout, width in whole.values()),
        full_bytes=sum(torch.Size(layout.shape).numel() * width for layout, width in layouts.values()),
        rules=_rules(resolved),
        implied=tuple(dict.fromkeys(generic_name(path) for path in resolved.implied)),
        unmatched_rules=resolved.unused_rules,
        unmatched_parameters=_held_whole(whole, resolved),
        valid_degrees=tuple(valid_degrees(model, rules)),
        rows=rows,
        collectives=collectives,
        bytes_per_step=sum(collective.bytes_per_step for collective in collectives),
        notes=resolved.notes,
    )


def valid_degrees(model: nn.Module, plan: Mapping[str, Any], *, up_to: int = _MAX_DEGREE) -> list[int]:
    """Degrees at which the plan splits evenly."""
    out = []
    for degree in range(1, up_to + 1):
        try:
            resolve_plan(model, plan, degree, strict=False)
        except UsageError:
            continue
        out.append(degree)
    return out


def _layouts(model: nn.Module, resolved: ResolvedPlan) -> dict[str, tuple[ShardLayout, int]]:
    """Name -> (layout, bytes of one element) of everything that is stored; tied tensors once."""
    out: dict[str, tuple[ShardLayout, int]] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            out[name] = (resolved.layout_of(name, tensor.shape), tensor.element_size())
    return out


def _held_whole(whole: Mapping[str, Any], resolved: ResolvedPlan) -> tuple[str, ...]:
    """Tensors that no rule speaks of, in the plan's own spelling."""
    return tuple(dict.fromkeys(generic_name(name) for name in whole if name.rpartition(".")[0] not in resolved.shards))


def _rules(resolved: ResolvedPlan) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for shard in resolved.shards.values():
        facts = out.setdefault(shard.rule, {"style": shard.style.name, "modules": 0})
        facts["modules"] += 1
    return out


def traffic(model: nn.Module, resolved: ResolvedPlan, rows: int) -> tuple[Collective, ...]:
    """Collectives of one forward step of `rows` rows, all modules called once (routed experts included)."""
    totals: dict[str, tuple[int, int]] = {}
    if resolved.degree == 1:
        return ()
    modules = dict(model.named_modules(remove_duplicate=False))
    for shard in resolved.shards.values():
        kind, values = _collective_of(shard, modules[shard.path])
        if kind:
            tensor = next(iter(modules[shard.path].parameters(recurse=False)), None)
            width = 4 if shard.style.kernel == "rms_norm" or tensor is None else tensor.element_size()
            count, total = totals.get(kind, (0, 0))
            totals[kind] = (count + 1, total + values * width * rows)
    return tuple(Collective(kind, count, total) for kind, (count, total) in sorted(totals.items()))


def _collective_of(shard: ModuleShard, module: nn.Module) -> tuple[str, int]:
    """(kind, values per row that rank 0 hands over) of one module's forward."""
    style, weight = shard.style, getattr(module, "weight", None)
    local = shard.part.local_sizes[0] if shard.part is not None else 0
    if style.kernel == "rms_norm":
        return "all_reduce", 1
    if style.kernel in ("moe_tensor", "moe_expert"):
        hidden = min(layout.shape[-2] for name, layout in shard.layouts.items() if len(layout.shape) == 3)
        down = [layout.shape for name, layout in shard.layouts.items() if "down" in name and len(layout.shape) == 3]
        return "all_reduce", down[0][-2] if down else hidden
    if style.leave == "gather":
        return "all_gather", local
    if style.leave in ("reduce", "scatter_rows") and weight is not None:
        shape = shard.layouts["weight"].shape
        outputs = shape[1] if style.cut == "vocab" or type(module).__name__ == "Conv1D" else shape[0]
        return ("all_reduce" if style.leave == "reduce" else "reduce_scatter"), outputs
    if style.enter == "gather_rows" and weight is not None:
        return "all_gather", shard.layouts["weight"].shape[1]
    return "", 0
