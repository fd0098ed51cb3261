"""From a plan to a decision for every module, on names and shapes alone: nothing is changed here, and everything that can be
wrong with a plan is found here.

Data flow: model (may be on meta) + plan + degree + shares -> `ResolvedPlan`: for each planned module a `ModuleShard` (style,
a `ShardLayout` per own tensor, the partition of the split dimension), the attributes that become local, the rules that
followed from others (norms inside attention, a tied embedding), the rules that hit nothing.

What can fail, as UsageError with the full path: see `split`, `heads`, `styles`, `matching`, plus packed styles without
blocks, tied weights that two rules split differently, a parameter rule on a module that is split otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Any

import torch
from torch import nn

from shardwise.errors import UsageError
from shardwise.tp import families
from shardwise.tp.attention import (
    AttributeChange,
    HeadBook,
    attribute_changes,
    block_roles,
    find_attentions,
    implied_norm_styles,
    role_of,
)
from shardwise.tp.dims import (
    block_prefix,
    check_fit,
    cut_dim,
    cut_size,
    is_transposed,
    kind_of,
    layouts_for,
    own_tensors,
    quant_block,
)
from shardwise.tp.experts import place_experts
from shardwise.tp.layout import Partition, ShardLayout
from shardwise.tp.matching import Match, match_plan
from shardwise.tp.split import Shares, block_sizes, by_index, checked_shares, packed, split_size
from shardwise.tp.styles import Style, as_style


@dataclass(frozen=True)
class ModuleShard:
    """What happens to one module. `layouts` covers its own tensors by name; `part` is the split dimension of its weight."""

    path: str
    style: Style
    rule: str
    layouts: Mapping[str, ShardLayout] = field(default_factory=dict)
    part: Partition | None = None


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan, decided. `implied` lists paths whose rule followed from others; `notes` is for people."""

    degree: int
    shares: Shares | None
    shards: Mapping[str, ModuleShard]
    attributes: tuple[AttributeChange, ...]
    heads: HeadBook
    unused_rules: tuple[str, ...]
    implied: tuple[str, ...]
    notes: tuple[str, ...]

    def layout_of(self, parameter: str, shape: Sequence[int]) -> ShardLayout:
        """The layout of a parameter or buffer by its full name; whole where no rule covers it."""
        path, _, name = parameter.rpartition(".")
        shard = self.shards.get(path)
        found = shard.layouts.get(name) if shard else None
        return found or ShardLayout(tuple(shape))


def resolve_plan(
    model: nn.Module, plan: Mapping[str, Any], degree: int, shares: Sequence[float] | None = None, *, strict: bool = True
) -> ResolvedPlan:
    """Decide everything; see the module docstring."""
    if degree < 1:
        raise UsageError(f"tp_degree {degree} is not at least 1")
    return _Resolver(model, plan, degree, checked_shares(shares, degree), strict).run()


class _Resolver:
    def __init__(self, model: nn.Module, plan: Mapping[str, Any], degree: int, shares: Shares | None, strict: bool) -> None:
        self.degree, self.shares = degree, shares
        self.modules = dict(model.named_modules(remove_duplicate=False))
        parameters = dict(model.named_parameters(remove_duplicate=False))
        names = [name for name in self.modules if name] + [name for name in parameters if name not in self.modules]
        matches, unused = match_plan(plan, names, strict=strict)
        self.parameters, self.unused = parameters, unused
        self.matches = [expanded for match in matches for expanded in expand_adapters(self.modules, match)]
        self.heads = find_attentions(self.modules, self.matches, degree, shares)
        self.units = self._shared_units()
        self.shards: dict[str, ModuleShard] = {}
        self.attributes: list[AttributeChange] = []
        self.implied: list[str] = []
        self.notes: list[str] = []

    def run(self) -> ResolvedPlan:
        for match in self.matches:
            if match.name in self.modules:
                self._add(match)
        for match in self.matches:
            if match.name not in self.modules:
                self._add_parameter(match)
        for attention in self.heads.attentions:
            self.attributes += attribute_changes(self.modules[attention.path], attention)
            for path, (style, part) in implied_norm_styles(self.modules, attention).items():
                self._imply_norm(path, style, part)
            if attention.split.replicates_kv:
                self.notes.append(f"{attention.path or 'model'}: KV heads are held by more than one rank")
        self._plain_experts_where_unaligned()
        self._settle_tied_weights()
        return ResolvedPlan(
            self.degree,
            self.shares,
            self.shards,
            tuple(self.attributes),
            self.heads,
            tuple(self.unused),
            tuple(self.implied),
            tuple(dict.fromkeys(self.notes)),
        )

    def _shared_units(self) -> dict[tuple[str, int], int]:
        """Split dimensions of one size in one block are cut alike, so their units combine: (block, size) -> unit."""
        units: dict[tuple[str, int], int] = {}
        for match in self.matches:
            module = self.modules.get(match.name)
            if module is None or match.style.cut not in ("out", "in") or kind_of(module) != "linear":
                continue
            size = cut_size(module, match.style.cut, match.name)
            sizes = self._sizes_of_blocks(module, match, size) if match.style.packed else [size]
            for block in sizes:
                key = (block_prefix(match.name), block)
                units[key] = lcm(units.get(key, 1), match.style.unit or 1, quant_block(module, match.style.cut))
        return units

    def _sizes_of_blocks(self, module: nn.Module, match: Match, size: int) -> list[int]:
        style = match.style
        blocks = style.blocks or getattr(module, style.block_attribute, None)
        if blocks is None and style.name in ("packed_colwise", "packed_rowwise"):
            blocks = (1, 1)  # transformers' name for a fused gate and up
        if not blocks:
            raise UsageError(
                f"{style.name} has no blocks",
                where=match.name,
                hint=f"pass `blocks`, or set `{style.block_attribute}` on the module",
            )
        return block_sizes(size, blocks, where=match.name)

    def _part(self, path: str, size: int, role: str, unit: int = 1) -> Partition:
        """The partition of a dimension: by heads where it belongs to attention, else in the units of its block."""
        by_heads = self.heads.part_for(path, size, role)
        if by_heads is not None:
            return by_heads
        unit = lcm(unit, self.units.get((block_prefix(path), size), 1))
        return split_size(size, self.degree, self.shares, unit=unit, where=path)

    def _part_of(self, match: Match, module: nn.Module | None, size: int, unit: int = 1) -> Partition:
        """The partition of a match's cut dimension, block by block where it is packed."""
        style = match.style
        unit = style.unit or unit
        if style.leave == "gather" or style.enter == "split" or style.cut == "vocab" or style.name == "vocab_head":
            # nobody outside sees these splits, so they need not be even: vocabularies seldom divide
            return split_size(size, self.degree, self.shares or (1.0,) * self.degree, unit=unit, where=match.name)
        if not style.packed:
            return self._part(match.name, size, role_of(match.name), unit)
        sizes = self._sizes_of_blocks(module or nn.Module(), match, size)
        roles = block_roles(match.name, len(sizes))
        parts = [self._part(match.name, block, role, unit) for block, role in zip(sizes, roles, strict=True)]
        self._local_sizes(match.name, sizes, parts)
        return packed(parts)

    def _local_sizes(self, path: str, sizes: list[int], parts: list[Partition]) -> None:
        """A module that cuts a fused projection by sizes of its own must see the local ones: known classes, and any parent
        that names such attributes in `_tp_local_attributes`."""
        owner = self.heads.owner_of(path)
        parent = owner.path if owner else path.rpartition(".")[0]
        module = self.modules[parent]
        special = families.LOCAL_SIZE_CLASSES.get(type(module).__name__, {})
        known = {(change.path, change.name) for change in self.attributes}
        for name in (*special.get("mlp", ()), *getattr(module, "_tp_local_attributes", ())):
            old = getattr(module, name, None)
            if old in sizes and (parent, name) not in known:
                self.attributes.append(AttributeChange(parent, name, parts[sizes.index(old)].local_sizes))

    def _add(self, match: Match) -> None:
        module, style = self.modules[match.name], _fitted(self.modules[match.name], match.style)
        check_fit(module, style, match.name)
        if style.cut == "none":
            layouts = {name: ShardLayout(tuple(tensor.shape)) for name, tensor in own_tensors(module)}
            self.shards[match.name] = ModuleShard(match.name, style, match.rule, layouts)
            return
        if style.cut == "expert":
            self._add_experts(match, module, style)
            return
        size = cut_size(module, style.cut, match.name) if style.kernel != "rms_norm" else _norm_size(module, match.name)
        part = (
            self._norm_part(match.name, size)
            if style.kernel == "rms_norm"
            else self._part_of(replace(match, style=style), module, size)
        )
        self.shards[match.name] = ModuleShard(
            match.name, style, match.rule, layouts_for(module, style.cut, part, match.name), part
        )
        if style.cut == "out" and is_transposed(module):
            self.attributes.append(AttributeChange(match.name, "nf", part.local_sizes))  # Conv1D reshapes its output by it

    def _norm_part(self, path: str, size: int) -> Partition:
        owner = self.heads.owner_of(path)
        implied = implied_norm_styles(self.modules, owner).get(path) if owner else None
        return implied[1] if implied and implied[1] is not None else self._part(path, size, "out")

    def _add_experts(self, match: Match, module: nn.Module, style: Style) -> None:
        num_experts = next(int(t.shape[0]) for _, t in own_tensors(module))
        owners = place_experts(num_experts, self.degree, self.shares, style.loads, where=match.name)
        part = by_index(owners, num_experts)
        layouts = {
            name: ShardLayout(tuple(t.shape), 0, part) if t.dim() and t.shape[0] == num_experts else ShardLayout(tuple(t.shape))
            for name, t in own_tensors(module)
        }
        self.shards[match.name] = ModuleShard(match.name, style, match.rule, layouts, part)
        for name in families.NUM_EXPERTS_ATTRIBUTES:
            if getattr(module, name, None) == num_experts:
                self.attributes.append(AttributeChange(match.name, name, part.local_sizes))
        if hasattr(module, "_is_expert_parallel"):
            self.attributes.append(AttributeChange(match.name, "_is_expert_parallel", (True,) * self.degree))

    def _add_parameter(self, match: Match) -> None:
        """A rule on a bare parameter (fused experts, attention sinks): its owner gets the layout."""
        path, _, name = match.name.rpartition(".")
        tensor, module = self.parameters[match.name], self.modules[path]
        shard = self.shards.get(path) or ModuleShard(path, as_style("local_params"), match.rule)
        if shard.style.cut == "expert":
            return  # whole experts are dealt by the rule on the module
        if shard.style.cut != "none":
            raise UsageError(
                f"the rule '{match.rule}' splits a parameter of a module that '{shard.rule}' splits", where=match.name
            )
        dim = cut_dim(module if tensor.dim() == 2 else None, tensor, match.style.cut)
        if dim is None:
            layout = ShardLayout(tuple(tensor.shape))
        elif match.style.cut == "expert":
            raise UsageError(
                "whole experts need the style 'expert_parallel' on the module", where=match.name, hint=f"on '{path}'"
            )
        else:
            layout = ShardLayout(tuple(tensor.shape), dim, self._parameter_part(match, module, tensor, dim))
        self.shards[path] = replace(shard, layouts={**shard.layouts, name: layout})

    def _parameter_part(self, match: Match, module: nn.Module, tensor: torch.Tensor, dim: int) -> Partition:
        size = int(tensor.shape[dim])
        owner = self.heads.owner_of(match.name)
        if owner is not None and not match.style.packed and size == owner.split.num_heads:
            return owner.split.q
        # fused experts run in grouped products, which want rows of whole 16 bytes
        aligned = max(1, 16 // tensor.element_size())
        block = min(self._sizes_of_blocks(module, match, size)) if match.style.packed else size
        unit = aligned if self.shares is not None and tensor.dim() == 3 and block % (aligned * self.degree) == 0 else 1
        return self._part_of(match, None, size, unit)

    def _plain_experts_where_unaligned(self) -> None:
        """transformers' grouped products refuse rows that are no multiple of 16 bytes: such experts run one by one."""
        for shard in self.shards.values():
            config = getattr(self.modules[shard.path], "config", None)
            if shard.style.kernel != "moe_tensor" or getattr(config, "_experts_implementation_internal", None) != "grouped_mm":
                continue
            sizes = {name: tensor.element_size() for name, tensor in own_tensors(self.modules[shard.path])}
            rows = [
                layout.local_shape(rank)[-1] * sizes[name]
                for name, layout in shard.layouts.items()
                for rank in range(self.degree)
            ]
            if any(row % 16 for row in rows):
                change = AttributeChange(shard.path, "config._experts_implementation_internal", ("eager",) * self.degree)
                self.attributes.append(change)
                self.notes.append(f"{shard.path}: rows of {min(rows)} bytes, so experts run one by one")

    def _imply_norm(self, path: str, style_name: str, part: Partition | None) -> None:
        given = self.shards.get(path)
        if given is not None and (part is None or given.style.kernel == "rms_norm"):
            return
        style = as_style(style_name)
        module = self.modules[path]
        layouts = layouts_for(module, "out", part, path) if part is not None and list(own_tensors(module)) else {}
        if part is None:
            layouts = {name: ShardLayout(tuple(t.shape)) for name, t in own_tensors(module)}
        self.shards[path] = ModuleShard(path, style, "follows from the split of its attention", layouts, part)
        self.implied.append(path)

    def _settle_tied_weights(self) -> None:
        """One tensor under several names must be cut the same way under each; a tied embedding follows its head."""
        by_tensor: dict[int, list[str]] = {}
        for name, tensor in self.parameters.items():
            by_tensor.setdefault(id(tensor), []).append(name)
        for names in by_tensor.values():
            if len(names) < 2:
                continue
            for name in names:
                self._follow_tie(name, names)
            layouts = {self._layout(name) for name in names}
            if len(layouts) > 1:
                raise UsageError(
                    f"'{names[0]}' and '{names[1]}' are one tensor, but the plan splits them differently",
                    where=names[0],
                    hint="give both the same split, or neither",
                )

    def _layout(self, name: str) -> ShardLayout:
        path, _, own = name.rpartition(".")
        shard = self.shards.get(path)
        return (shard.layouts.get(own) if shard else None) or ShardLayout(tuple(self.parameters[name].shape))

    def _follow_tie(self, name: str, names: Sequence[str]) -> None:
        path, _, own = name.rpartition(".")
        module = self.modules[path]
        if path in self.shards or not isinstance(module, nn.Embedding):
            return
        for other in names:
            layout = self._layout(other)
            if layout.dim == 0 and layout.partition is not None:
                style = as_style("embedding_rowwise")
                self.shards[path] = ModuleShard(path, style, f"tied to '{other}'", {own: layout}, layout.partition)
                self.implied.append(path)
                return


def _fitted(module: nn.Module, style: Style) -> Style:
    """torch's column and row styles on an embedding mean its hidden columns and its vocabulary rows."""
    if isinstance(module, nn.Embedding) and style.name in ("colwise", "rowwise"):
        return replace(as_style("embedding_colwise"), leave="as_is") if style.name == "colwise" else as_style("embedding_rowwise")
    return style


def _norm_size(module: nn.Module, path: str) -> int:
    weight = getattr(module, "weight", None)
    shape = tuple(weight.shape) if weight is not None else tuple(getattr(module, "normalized_shape", ()))
    if len(shape) != 1:
        raise UsageError(f"{type(module).__name__} does not normalise one dimension", where=path)
    return int(shape[0])


def expand_adapters(modules: Mapping[str, nn.Module], match: Match) -> list[Match]:
    """A rule on a LoRA layer becomes rules on what it wraps: outputs split -> base and B; inputs split -> base and A."""
    module = modules.get(match.name)
    if module is None or not isinstance(getattr(module, "base_layer", None), nn.Module):
        return [match]
    known = {"lora_A", "lora_B"}
    adapters = {name for name, child in module.named_children() if name.startswith("lora_") and list(child.parameters())}
    other = sorted(adapters - known) + ["lora_embedding_A"] * bool(len(getattr(module, "lora_embedding_A", ())))
    if not hasattr(module, "lora_A") or other:
        raise UsageError(
            f"{type(module).__name__} adapts '{match.name}' in a way that cannot be split ({', '.join(other) or 'no lora_A'})",
            where=match.name,
            hint="plain LoRA on linear layers can; merge the adapter into the weights first",
        )
    inner = "lora_B" if match.style.cut == "out" else "lora_A"
    names = [f"{match.name}.base_layer", *(f"{match.name}.{inner}.{adapter}" for adapter in getattr(module, inner))]
    return [replace(match, name=name) for name in names]
