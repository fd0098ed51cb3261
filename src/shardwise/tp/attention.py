"""Finds the attention modules that a plan splits, and what splitting by heads means for each of them.

From names and shapes: an attention module is the parent of a split projection with a query's name (or a fused one), where
the size of a head is known from an attribute. Out come the `HeadSplit` shared by its q, k, v and output projections, the
attributes that must become local (`num_heads`, `num_key_value_groups`, ...) and the rules that follow for norms on
queries and keys: a norm per head is replicated with summed gradients, a norm over all heads spans the ranks.

What can fail: heads that cannot be dealt (see `heads`), a norm over all heads that is no RMSNorm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.errors import UsageError
from shardwise.tp import families
from shardwise.tp.dims import adapted_path, block_prefix, cut_size, leaf_name
from shardwise.tp.heads import HeadSplit, split_heads
from shardwise.tp.layout import Partition
from shardwise.tp.matching import Match
from shardwise.tp.split import Shares, block_sizes


@dataclass(frozen=True)
class AttributeChange:
    """`values[rank]` replaces attribute `name` of the module at `path`; `config.x` means a private copy of its config."""

    path: str
    name: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Attention:
    """One attention module and its heads over the ranks."""

    path: str
    split: HeadSplit
    fused: bool
    latent: bool = False
    """Multi-head latent attention: queries, keys with values, and outputs have sizes of their own per head."""

    def part_for(self, role: str, size: int) -> Partition | None:
        """The partition of a projection with `role` ('q', 'kv' or 'out') and `size` features."""
        if self.latent:
            heads = self.split.q
            return heads.scaled(size // heads.size) if size % heads.size == 0 else None
        if role == "kv" and size == self.split.kv.size * self.split.head_dim:
            return self.split.kv_features
        if role != "kv" and size == self.split.q.size * self.split.head_dim:
            return self.split.q_features
        return None


class HeadBook:
    """All attention modules of a plan; answers how a dimension inside them is split."""

    def __init__(self, attentions: Sequence[Attention]) -> None:
        self.attentions = list(attentions)
        self._by_path = {attention.path: attention for attention in attentions}
        self._by_block: dict[str, list[Attention]] = {}
        for attention in attentions:
            self._by_block.setdefault(block_prefix(attention.path + ".x"), []).append(attention)

    def owner_of(self, path: str) -> Attention | None:
        """The nearest attention module above a path."""
        parts = path.split(".")
        for end in range(len(parts) - 1, -1, -1):
            found = self._by_path.get(".".join(parts[:end]))
            if found is not None:
                return found
        return None

    def part_for(self, path: str, size: int, role: str) -> Partition | None:
        """By heads, where the dimension belongs to an attention module, or has the size of the queries of its block (an
        output projection that stands beside the attention, or an MLP of equal width, which then splits the same way)."""
        owner = self.owner_of(path)
        if owner is not None and (part := owner.part_for(role, size)) is not None:
            return part
        if role == "kv" or (owner is not None and owner.latent):
            return None
        for attention in self._by_block.get(block_prefix(path), []):
            if not attention.latent and (part := attention.part_for("q", size)) is not None:
                return part
        return None


def role_of(path: str) -> str:
    """'q', 'kv' or 'out' from a module's name."""
    name = leaf_name(path)
    if name in families.KEY_NAMES or name in families.VALUE_NAMES or name in families.FUSED_KV_NAMES:
        return "kv"
    return "q" if name in families.QUERY_NAMES else "out"


def block_roles(path: str, num_blocks: int) -> list[str]:
    """The role of each fused block: q, k, v, then whatever else."""
    name = leaf_name(path)
    if name in families.FUSED_QKV_NAMES and num_blocks >= 3:
        return ["q", "kv", "kv"] + ["out"] * (num_blocks - 3)
    return ["kv" if name in families.FUSED_KV_NAMES else "out"] * num_blocks


def find_attentions(modules: Mapping[str, nn.Module], matches: Sequence[Match], degree: int, shares: Shares | None) -> HeadBook:
    """Every attention module whose queries the plan splits and keeps split."""
    found: dict[str, Attention] = {}
    for match in matches:
        module = modules.get(match.name)
        if module is None or match.style.cut != "out" or match.style.leave == "gather":
            continue
        name = leaf_name(match.name)
        parent_path = adapted_path(match.name).rpartition(".")[0]
        if parent_path in found or name not in families.QUERY_NAMES | families.FUSED_QKV_NAMES:
            continue
        latent = _int_attribute(modules[parent_path], ("kv_lora_rank",))
        heads = _int_attribute(modules[parent_path], families.NUM_HEADS_ATTRIBUTES)
        if latent is not None and heads is not None:
            split = split_heads(heads[1], heads[1], 1, degree, shares, where=parent_path)
            found[parent_path] = Attention(parent_path, split, fused=False, latent=True)
            continue
        sizes = _qkv_sizes(modules, match, module, parent_path)
        if sizes is None:
            continue
        head_dim = _head_dim(modules[parent_path], sizes[0])
        if head_dim is None or sizes[1] % head_dim:
            continue
        split = split_heads(sizes[0] // head_dim, sizes[1] // head_dim, head_dim, degree, shares, where=parent_path)
        found[parent_path] = Attention(parent_path, split, name in families.FUSED_QKV_NAMES)
    return HeadBook(list(found.values()))


def _qkv_sizes(modules: Mapping[str, nn.Module], match: Match, module: nn.Module, parent: str) -> tuple[int, int] | None:
    """(query features, key features)."""
    total = cut_size(_base(module), "out", match.name)
    if leaf_name(match.name) in families.QUERY_NAMES:
        prefix = f"{parent}." if parent else ""
        for key_name in sorted(families.KEY_NAMES):
            key = modules.get(prefix + key_name)
            if key is not None and hasattr(_base(key), "weight"):
                return total, cut_size(_base(key), "out", prefix + key_name)
        return total, total
    if not match.style.packed:
        return None
    blocks = match.style.blocks or getattr(_base(module), match.style.block_attribute, None)
    if not blocks or len(blocks) < 3:
        return None
    sizes = block_sizes(total, blocks, where=match.name)
    return sizes[0], sizes[1]


def _base(module: nn.Module) -> nn.Module:
    """Under an adapter (LoRA) the module that it adapts."""
    base = getattr(module, "base_layer", None)
    return base if isinstance(base, nn.Module) else module


def _int_attribute(module: nn.Module, names: Sequence[str]) -> tuple[str, int] | None:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return name, value
    return None


def _head_dim(module: nn.Module, q_size: int) -> int | None:
    direct = _int_attribute(module, families.HEAD_DIM_ATTRIBUTES)
    if direct is not None and q_size % direct[1] == 0:
        return direct[1]
    heads = _int_attribute(module, families.NUM_HEADS_ATTRIBUTES)
    return q_size // heads[1] if heads is not None and q_size % heads[1] == 0 else None


def attribute_changes(module: nn.Module, attention: Attention) -> list[AttributeChange]:
    """What an attention module's forward must see as its own number of heads."""
    split = attention.split
    q, kv, size = split.q.local_sizes, split.kv.local_sizes, split.head_dim
    wanted: list[tuple[Sequence[str], int, tuple[int, ...]]] = [
        (families.NUM_HEADS_ATTRIBUTES, split.num_heads, q),
        (families.NUM_KV_HEADS_ATTRIBUTES, split.num_kv_heads, kv),
        (families.GROUPS_ATTRIBUTES, split.num_heads // split.num_kv_heads, split.groups),
        (families.LOCAL_Q_SIZE_ATTRIBUTES, split.num_heads * size, tuple(n * size for n in q)),
        (families.LOCAL_KV_SIZE_ATTRIBUTES, split.num_kv_heads * size, tuple(n * size for n in kv)),
    ]
    special = families.LOCAL_SIZE_CLASSES.get(type(module).__name__)
    if special:
        wanted.append((special["q"], split.num_heads * size, tuple(n * size for n in q)))
    changes = [
        AttributeChange(attention.path, name, values)
        for names, old, values in wanted
        for name in names
        if getattr(module, name, None) == old and set(values) != {old}
    ]
    config = getattr(module, "config", None)
    if attention.fused and config is not None:
        for names, old, values in (
            (families.CONFIG_HEADS, split.num_heads, q),
            (families.CONFIG_KV_HEADS, split.num_kv_heads, kv),
        ):
            changes += [
                AttributeChange(attention.path, f"config.{name}", values) for name in names if getattr(config, name, None) == old
            ]
    return changes


def implied_norm_styles(modules: Mapping[str, nn.Module], attention: Attention) -> dict[str, tuple[str, Partition | None]]:
    """Norms on queries and keys inside an attention module: path -> (style name, partition of a norm over all heads)."""
    if attention.latent:
        return {}  # its norms act on the latent vectors, before the heads
    split = attention.split
    prefix = f"{attention.path}." if attention.path else ""
    out: dict[str, tuple[str, Partition | None]] = {}
    for name in families.QUERY_NORM_NAMES | families.KEY_NORM_NAMES:
        module = modules.get(prefix + name)
        if module is None:
            continue
        width = _norm_width(module)
        heads = split.q if name in families.QUERY_NORM_NAMES else split.kv
        if width is None or width == split.head_dim:
            out[prefix + name] = ("replicated_with_grad_allreduce", None)
        elif width == heads.size * split.head_dim:
            if "RMSNorm" not in type(module).__name__:
                raise UsageError(
                    f"{type(module).__name__} normalises over all heads, which are split",
                    where=prefix + name,
                    hint="only RMSNorm can span ranks; give q and k the style 'colwise_gather_output'",
                )
            out[prefix + name] = ("rms_norm_across_ranks", heads.scaled(split.head_dim))
    return out


def _norm_width(module: nn.Module) -> int | None:
    weight = getattr(module, "weight", None)
    if weight is not None:
        return int(weight.numel())
    shape = getattr(module, "normalized_shape", None)
    return int(shape[-1]) if shape else None
