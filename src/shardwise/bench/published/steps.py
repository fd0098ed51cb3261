"""Seconds of one step on a row's devices, from the planner's cost model: a layer, all layers, a share of them, tiers of memory.

Weights lie in the fastest memory first: the accelerator's, the host's, and what fits neither comes from disk at every token
(a cliff, see `planner.cost_memory`). Nothing fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardwise.bench.published.calibration import Calibration
from shardwise.bench.published.case import Case, Device
from shardwise.machines.devices import DeviceSpec
from shardwise.machines.profile import DeviceProfile
from shardwise.model.description import ModelDescription
from shardwise.planner.cost_compute import LayerClasses, StepShape, head_s

VRAM_SHARE = 0.9  # of the accelerator's memory for weights; the rest is KV cache, buffers, the screen
PAGE_CACHE_SLACK = 1.75  # "available" memory leaves out pages that the system gives up for mapped weights
DISK_BYTES_PER_S = 1e9
_ROUNDING = 1.01
HOST_SPEED = {
    "h100": 1.5,
    "h100 pcie": 1.5,
    "h200": 1.5,
}  # one thread of its hosts (2023) against an A100's (2020): SPECint 2017 rates
# A desktop or laptop of 2021-2023 with an accelerator: two channels of DDR5-4800.
_HOST_CPU = DeviceSpec(
    name="host cpu", kind="cpu", device_class="cpu", memory_bytes=64e9, memory_bytes_per_s=76.8e9, flops_per_s=1.0e12
)


@dataclass(frozen=True, slots=True)
class Tier:
    """A part of a device's memory."""

    capacity_bytes: float
    profile: DeviceProfile
    paged: bool = False  # beyond it lies the disk


@lru_cache(maxsize=256)
def _classes(name: str, quantization: str, layers: int) -> list[LayerClasses]:
    return []


def layers_s(case: Case, profile: DeviceProfile, shape: StepShape) -> float:
    """All layers of the model, at least what starting their kernels takes."""
    kept = _classes(case.model.name, case.model.quantization, case.model.num_layers)
    if not kept:
        kept.append(LayerClasses.of(case.model))
    floor = launch_s(case, profile)
    return float(sum(max(floor, t) for t in kept[0].times_s(profile, shape, case.kv_type)))


def launch_s(case: Case, profile: DeviceProfile) -> float:
    """The least a layer takes under this program and host."""
    return case.framework.launch_s / HOST_SPEED.get(profile.name, 1.0)


def layer_bytes(model: ModelDescription) -> float:
    """Bytes of all layers and the head."""
    return float(sum(layer.weight_bytes for layer in model.layers) + model.head_bytes)


def tiers(case: Case, device: Device, calibration: Calibration, override: dict[str, float] | None = None) -> list[Tier]:
    """Fastest first."""
    main = case.profile(device.spec, calibration, override)
    stated = device.machines
    if stated.vram_bytes:  # an accelerator, and a host whose memory is stated
        host = case.profile(_HOST_CPU, calibration)
        room = (stated.memory_bytes or 0.0) * PAGE_CACHE_SLACK
        return [Tier(stated.vram_bytes * VRAM_SHARE, main), Tier(room, host, paged=True)]
    if device.spec.kind in ("cuda", "vulkan"):
        return [Tier(device.vram_bytes, main), Tier(64e9, case.profile(_HOST_CPU, calibration), paged=True)]
    slack = PAGE_CACHE_SLACK if stated.disk_bytes_per_s else 1.0
    return [Tier(device.vram_bytes * slack, main, paged=True)]


def spills(case: Case) -> bool:
    """Whether the model does not fit the fastest memory of the row's only device."""
    if case.ask.quantity.startswith("layer_"):
        return False  # one layer alone
    return layer_bytes(case.model) > tiers(case, case.devices[0], Calibration())[0].capacity_bytes


def share_s(case: Case, device: Device, parts: list[Tier], share: float, shape: StepShape) -> float:
    """Seconds of `share` of the layers on one device, in whatever memory they fit."""
    total = layer_bytes(case.model)
    left, seconds = share * total, 0.0
    for index, tier in enumerate(parts):
        here = left if index == len(parts) - 1 else min(left, tier.capacity_bytes)
        if tier.paged and here > tier.capacity_bytes * _ROUNDING:
            touched = here * _touched(case.model, shape)
            return seconds + touched / (device.machines.disk_bytes_per_s or DISK_BYTES_PER_S)
        if here > 0:
            seconds += here / total * layers_s(case, tier.profile, shape)
        left -= here
    return seconds


def _touched(model: ModelDescription, shape: StepShape) -> float:
    rows = max(1, round(shape.rows))
    active = sum(layer.active_weight_bytes(rows) for layer in model.layers)
    return active / max(1, sum(layer.weight_bytes for layer in model.layers))


def ends_s(case: Case, profile: DeviceProfile, shape: StepShape) -> float:
    """Norm and head of a step."""
    return head_s(case.model, profile, shape.sampled_rows)
