"""What cannot be split, found before anything is touched: each check names the module and the way out.

Refused: a model that is split already, quantized modules of a kind without a proven split, weights that accelerate or
diffusers move around (offloading), meta tensors without a source, hooks that replaced a forward; and an adapter that is put
on a split module later (a registration hook, because that happens outside our calls).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from shardwise.errors import UsageError
from shardwise.tp import families
from shardwise.tp.bound import SHARD, bound_modules


def check_model(model: nn.Module, *, allow_meta: bool) -> None:
    """UsageError for a model that cannot be split as it is."""
    bound = bound_modules(model)
    if bound:
        raise UsageError("the model is split already", where=next(iter(bound)) or "model", hint="call undo(model) first")
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None or getattr(model, "is_quantized", False):
        _refuse_quantized(type(quantizer).__name__ if quantizer is not None else "quantized model", type(model).__name__)
    device_map = getattr(model, "hf_device_map", None)
    if device_map is not None and len({str(device) for device in device_map.values()}) > 1:
        raise UsageError("the model is spread over devices by accelerate's device_map", hint="load it without device_map")
    for path, module in model.named_modules():
        _check_module(path or "model", module)
    if not allow_meta:
        for name, tensor in model.named_parameters():
            if tensor.is_meta:
                raise UsageError(
                    "the parameter has no data (meta)", where=name, hint="use load_sharded, which reads only this rank's part"
                )


def _check_module(path: str, module: nn.Module) -> None:
    kind = type(module).__name__
    if (any(part in kind for part in families.QUANTIZED_CLASS_PARTS) or "quantized" in type(module).__module__) and not hasattr(
        module, "_tp_quant_block"
    ):
        _refuse_quantized(kind, path)
    for name, tensor in module._parameters.items():
        if tensor is not None and any(part in type(tensor).__name__ for part in families.QUANTIZED_TENSOR_PARTS):
            _refuse_quantized(type(tensor).__name__, f"{path}.{name}")
        if type(tensor).__name__ == "DTensor":
            raise UsageError(
                "the parameter is a DTensor", where=f"{path}.{name}", hint="give a plain module; torch split this one already"
            )
    if "_hf_hook" in module.__dict__:
        raise UsageError("accelerate places or offloads this module", where=path, hint="load without device_map and offloading")
    registry = getattr(module, "_diffusers_hook", None)
    if registry is not None and any("offload" in str(name) for name in getattr(registry, "hooks", {})):
        raise UsageError(
            "diffusers offloads this module", where=path, hint="split without group offloading: each rank holds its part only"
        )


def _refuse_quantized(kind: str, where: str) -> None:
    raise UsageError(
        f"{kind} is quantized in a layout that cannot be split",
        where=where,
        hint="load the model unquantized; a module of your own with blocks of inputs can set `_tp_quant_block`",
    )


def _no_adapter_on_split(module: nn.Module, name: str, child: Any) -> None:
    """torch calls this whenever a submodule is put anywhere."""
    if name == "base_layer" and isinstance(child, nn.Module):
        bound = child.__dict__.get(SHARD)
        if bound is not None:
            raise UsageError(
                f"{type(module).__name__} would adapt a module that is already split",
                where=bound.shard.path,
                hint="add the adapter before apply_tensor_parallel (it is then split along), or undo(model) first",
            )


_guarded = False


def guard_against_late_adapters() -> None:
    """Install the registration hook, once per process."""
    global _guarded
    if not _guarded:
        register_module_module_registration_hook(_no_adapter_on_split)
        _guarded = True
