"""Styles as declared data: which dimension of which parameter is split, what happens to the input, what to the output.

A plan maps names to styles: strings of the registry, `PackedColwiseParallel` / `PackedRowwiseParallel`, or any `Style`. Plans
written for diffusers (its own packed classes), for transformers (all style names of its plans) and with torch's
`ColwiseParallel()` / `RowwiseParallel()` are read as they are. `register_style` adds one.

What can fail: an unknown name (UsageError with the nearest one), an object that is no style.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardwise.errors import UsageError

Cut = Literal["out", "in", "vocab", "hidden", "expert", "none"]
Enter = Literal["as_is", "copy", "split", "gather_rows", "split_rows"]
Leave = Literal["as_is", "reduce", "gather", "scatter_rows", "gather_rows"]
Fit = Literal["linear", "embedding", "norm", "experts", "parameter", "any"]


@dataclass(frozen=True)
class Style:
    """One way to split a module.

    cut: the dimension of the weight that is split: its outputs, its inputs, vocabulary rows, hidden columns, whole experts.
    enter: the input is used as it is (replicated, or already local); `copy`: replicated, its gradient is summed; `split`: the
        rank takes its part of the last dimension; `gather_rows`: sequence rows of all ranks are joined; `split_rows`: the
        rank takes its rows.
    leave: as it is; `reduce`: summed over ranks; `gather`: parts of the last dimension joined; `scatter_rows`: summed, each
        rank keeps its rows; `gather_rows`: rows of all ranks joined.
    kernel: which forward runs between the two (see `kernels`).
    sum_grads: parameters are replicated but each rank sees only its part of the activations, so gradients are summed.
    """

    name: str
    cut: Cut = "none"
    enter: Enter = "as_is"
    leave: Leave = "as_is"
    kernel: str = "plain"
    fits: tuple[Fit, ...] = ("any",)
    packed: bool = False
    sum_grads: bool = False
    blocks: tuple[int, ...] | None = None
    unit: int | None = None
    loads: tuple[float, ...] | None = None

    @property
    def block_attribute(self) -> str:
        """Where a module may carry the blocks of its fused parts."""
        return "_tp_packed_col_blocks" if self.cut == "out" else "_tp_packed_row_blocks"


@dataclass(frozen=True)
class PackedColwiseParallel:
    """Split each fused part of the outputs on its own. `blocks`: proportional integers ([1, 1] for gate and up,
    [1, 1, 1, 3, 3] for q, k, v, gate, up with an MLP three times as wide) or sizes; None takes the module's
    `_tp_packed_col_blocks`. `unit`: outputs that must stay together (default: heads where attention is recognised, else 1)."""

    blocks: Sequence[int] | None = None
    unit: int | None = None


@dataclass(frozen=True)
class PackedRowwiseParallel:
    """Split each fused part of the inputs on its own; None takes the module's `_tp_packed_row_blocks`."""

    blocks: Sequence[int] | None = None
    unit: int | None = None


@dataclass(frozen=True)
class ExpertParallel:
    """Whole experts by index. `loads`: how often each expert is used; experts are then placed so that no rank waits long."""

    loads: Sequence[float] | None = None


_LINEAR: tuple[Fit, ...] = ("linear", "parameter")

_REGISTRY: dict[str, Style] = {}


def register_style(style: Style, *aliases: str, replace_existing: bool = False) -> Style:
    """Make a style usable by name in any plan. UsageError if the name is taken and `replace_existing` is not set."""
    for name in (style.name, *aliases):
        if name in _REGISTRY and not replace_existing:
            raise UsageError(f"a style named '{name}' exists already", hint="choose another name or pass replace_existing=True")
        _REGISTRY[name] = style
    return style


def style_names() -> list[str]:
    return sorted(_REGISTRY)


for _style, _aliases in (
    (Style("colwise", "out", "copy", fits=_LINEAR), ()),
    (Style("rowwise", "in", "as_is", "reduce", kernel="row", fits=_LINEAR), ()),
    (Style("colwise_gather_output", "out", "copy", "gather", fits=_LINEAR), ("colwise_rep",)),
    (Style("rowwise_split_input", "in", "split", "reduce", kernel="row", fits=_LINEAR), ("rowwise_rep",)),
    (Style("packed_colwise", "out", "copy", packed=True, fits=_LINEAR), ()),
    (Style("packed_rowwise", "in", "as_is", "reduce", kernel="row", packed=True, fits=_LINEAR), ()),
    (Style("embedding_rowwise", "vocab", leave="reduce", kernel="vocab", fits=("embedding",)), ("vocab_embedding",)),
    (Style("embedding_colwise", "hidden", leave="gather", fits=("embedding",)), ()),
    (Style("vocab_head", "out", "copy", fits=("linear",)), ()),
    (Style("replicated"), ("replicate", "moe_router", "ep_router")),
    (Style("replicated_with_grad_allreduce", sum_grads=True), ()),
    (Style("rms_norm_across_ranks", "out", kernel="rms_norm", fits=("norm",)), ("distributed_rms_norm",)),
    (Style("sequence_parallel", sum_grads=True), ()),
    (Style("split_sequence", leave="as_is", enter="split_rows"), ()),
    (Style("gather_sequence", leave="gather_rows"), ()),
    (Style("colwise_sequence", "out", "gather_rows", fits=_LINEAR), ()),
    (Style("rowwise_sequence", "in", "as_is", "scatter_rows", kernel="row", sum_grads=True, fits=_LINEAR), ()),
    (Style("moe_tp_experts", kernel="moe_tensor", fits=("experts",)), ()),
    (
        Style("expert_parallel", "expert", kernel="moe_expert", fits=("experts",)),
        ("ep_dispatch_experts", "moe_experts_allreduce"),
    ),
    (Style("grouped_gemm", "expert", fits=("parameter",)), ()),
    (Style("all_reduce", leave="reduce"), ()),
    (Style("moe_identity_expert", kernel="divide"), ()),
    (Style("local_params"), ()),
    (Style("mla_kv_a_proj", kernel="mla_kv_a"), ()),
):
    register_style(_style, *_aliases)


def as_style(value: Any, *, where: str = "") -> Style:
    """The style a plan's value stands for."""
    if isinstance(value, Style):
        return value
    if isinstance(value, str):
        if value not in _REGISTRY:
            near = difflib.get_close_matches(value, _REGISTRY, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"known styles: {', '.join(style_names())}"
            raise UsageError(f"unknown style '{value}'", where=where, hint=hint)
        return _REGISTRY[value]
    if isinstance(value, ExpertParallel):
        return replace(_REGISTRY["expert_parallel"], loads=None if value.loads is None else tuple(map(float, value.loads)))
    kind = type(value).__name__
    if kind in ("PackedColwiseParallel", "PackedRowwiseParallel"):
        return _packed(value, "packed_colwise" if kind == "PackedColwiseParallel" else "packed_rowwise")
    if kind in ("ColwiseParallel", "RowwiseParallel", "SequenceParallel"):
        return _from_torch(value, kind)
    raise UsageError(
        f"{value!r} is no tensor-parallel style",
        where=where,
        hint=f"use a name ({', '.join(style_names()[:6])}, ...), PackedColwiseParallel, PackedRowwiseParallel or a Style",
    )


def _packed(value: Any, base: str) -> Style:
    """Ours and diffusers' carry `blocks`, transformers' a `split_factor` of equal parts."""
    blocks = getattr(value, "blocks", None)
    if blocks is None and isinstance(getattr(value, "split_factor", None), int):
        blocks = [1] * value.split_factor
    return replace(
        _REGISTRY[base],
        name="PackedColwiseParallel" if base == "packed_colwise" else "PackedRowwiseParallel",
        blocks=None if blocks is None else tuple(blocks),
        unit=getattr(value, "unit", None),
    )


def _from_torch(value: Any, kind: str) -> Style:
    """torch's (and transformers') style objects; only their layouts on input and output matter here."""

    def replicated(attribute: str) -> bool:
        layouts = getattr(value, attribute, None)
        first = layouts[0] if isinstance(layouts, tuple) and layouts else layouts
        return type(first).__name__ == "Replicate"

    if kind == "ColwiseParallel":
        return _REGISTRY["colwise_gather_output" if replicated("output_layouts") else "colwise"]
    if kind == "RowwiseParallel":
        return _REGISTRY["rowwise_split_input" if replicated("input_layouts") else "rowwise"]
    return _REGISTRY["sequence_parallel"]
