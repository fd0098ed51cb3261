"""Which dimension of which tensor a cut means, for each kind of module. Shapes only, so it works on meta tensors.

Shape legend: O outputs, I inputs, V vocabulary, D hidden, E experts. Linear weight (O, I); transformers' Conv1D weight (I, O);
Embedding weight (V, D); fused experts (E, O, I); a bare parameter (..., O, I) or (O,).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from shardwise.errors import UsageError
from shardwise.tp.layout import Partition, ShardLayout
from shardwise.tp.styles import Cut, Fit, Style


def adapted_path(path: str) -> str:
    """The module that a part of an adapter stands for: `attn.q_proj.lora_B.default` -> `attn.q_proj`."""
    parts = path.split(".")
    inner = [index for index, part in enumerate(parts) if part in ("base_layer", "lora_A", "lora_B")]
    return ".".join(parts[: inner[0]]) if inner else path


def leaf_name(path: str) -> str:
    """The last component that is a word: `attn.to_out.0` -> `to_out`."""
    words = [part for part in adapted_path(path).split(".") if part and not part.isdigit()]
    return words[-1] if words else ""


def block_prefix(path: str) -> str:
    """The block a module lives in: everything up to its first number (`layers.3.mlp.up` -> `layers.3`), else ''."""
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ""


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is stored (I, O), as GPT-2's Conv1D stores it."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def kind_of(module: nn.Module) -> Fit:
    """What styles a module takes, from what it is."""
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.Linear) or is_transposed(module):
        return "linear"
    if "Norm" in type(module).__name__:
        return "norm"
    own = list(module.parameters(recurse=False))
    if own and all(p.dim() >= 2 for p in own) and any(p.dim() == 3 for p in own):
        return "experts"
    if isinstance(weight, torch.Tensor) and weight.dim() == 2 and hasattr(module, "in_features"):
        return "linear"
    return "any"


def check_fit(module: nn.Module, style: Style, path: str) -> None:
    """UsageError where a style cannot be used on a module."""
    kind = kind_of(module)
    if "any" in style.fits or kind in style.fits:
        return
    raise UsageError(
        f"style '{style.name}' does not fit a {type(module).__name__}", where=path, hint=f"it fits: {', '.join(style.fits)}"
    )


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's own parameters and buffers (not those of its children)."""
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None:
            yield name, tensor


def cut_dim(module: nn.Module | None, tensor: torch.Tensor, cut: Cut) -> int | None:
    """The dimension of `tensor` that `cut` means in this module; None: this tensor stays whole."""
    if cut == "none" or tensor.dim() == 0:
        return None
    if cut in ("expert", "vocab"):
        return 0
    if cut == "hidden":
        return tensor.dim() - 1
    if tensor.dim() == 1:
        return 0 if cut == "out" else None
    if module is not None and is_transposed(module):
        return 1 if cut == "out" else 0
    return tensor.dim() - (2 if cut == "out" else 1)


def cut_size(module: nn.Module, cut: Cut, path: str) -> int:
    """How many indices the cut dimension of the module's weight has."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        raise UsageError(f"{type(module).__name__} has no weight to split", where=path)
    dim = cut_dim(module, weight, cut)
    if dim is None:
        raise UsageError(f"the weight of {type(module).__name__} has no dimension to split so", where=path)
    return int(weight.shape[dim])


def layouts_for(module: nn.Module, cut: Cut, part: Partition, path: str) -> dict[str, ShardLayout]:
    """A layout for each own tensor. Tensors beside the weight (bias, scales of quantization blocks) are cut in proportion."""
    out: dict[str, ShardLayout] = {}
    for name, tensor in own_tensors(module):
        dim = cut_dim(module, tensor, cut)
        shape = tuple(tensor.shape)
        if dim is None or (shape[dim] != part.size and part.size % max(shape[dim], 1)):
            out[name] = ShardLayout(shape)
        elif shape[dim] == part.size:
            out[name] = ShardLayout(shape, dim, part)
        else:
            out[name] = ShardLayout(shape, dim, part.scaled(shape[dim], part.size))
    if not any(layout.dim is not None for layout in out.values()):
        raise UsageError(f"{type(module).__name__} has nothing to split", where=path)
    return out


def quant_block(module: nn.Module, cut: Cut) -> int:
    """Inputs (or outputs) that share a quantization scale and must stay together: the module's `_tp_quant_block`, else 1."""
    block = getattr(module, "_tp_quant_block", 1)
    return int(block) if cut == "in" or getattr(module, "_tp_quant_dim", 1) == 0 else 1
