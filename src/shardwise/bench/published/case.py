"""A row made ready for prediction: model described, devices known, program and links found; or the reason why not.

Promises: `prepare` never raises for what a row says; it gives a `Case` or a `Skip` with a reason in plain words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.bench.published.calibration import Calibration, Key, device_profile, weights_family
from shardwise.bench.published.frameworks import Framework, framework_of
from shardwise.bench.published.metrics import Question, question
from shardwise.bench.published.rows import Machines, Row
from shardwise.bench.published.wires import link_of
from shardwise.errors import ShardwiseError
from shardwise.machines.devices import DeviceSpec, find_device
from shardwise.machines.profile import DeviceProfile, LinkProfile
from shardwise.model.description import ModelDescription
from shardwise.model.preset_quantization import parse_quantization
from shardwise.model.presets import describe_preset
from shardwise.records import replace

MAX_MACHINES, MAX_TOKENS = 4096, 1e7
_TENSOR = re.compile(r"tensor par|tensor rdma|\btp\d?\b|\btp\s*x|tensor x")


@dataclass(frozen=True, slots=True)
class Skip:
    """Why a row cannot be predicted."""

    reason: str


@dataclass(frozen=True, slots=True)
class Device:
    """One device of the row."""

    spec: DeviceSpec
    machines: Machines

    @property
    def vram_bytes(self) -> float:
        """What fits the accelerator."""
        m = self.machines
        if m.vram_bytes:
            return m.vram_bytes
        return m.memory_bytes or self.spec.memory_bytes


@dataclass(frozen=True, slots=True)
class Case:
    """Everything a prediction needs."""

    row: Row
    ask: Question
    model: ModelDescription
    label: str
    framework: Framework
    devices: tuple[Device, ...]
    link: LinkProfile
    inside: bool  # all devices in one machine

    @property
    def strategy(self) -> str:
        """single | tensor | pipeline."""
        if len(self.devices) == 1:
            return "single"
        return "tensor" if _TENSOR.search(self.row.strategy) else "pipeline"

    def key(self, spec: DeviceSpec, phase: str) -> Key:
        """What an efficiency of this row belongs to."""
        return Key(spec.name, spec.device_class, self.framework.kernels, phase, weights_family(self.label))

    def profile(self, spec: DeviceSpec, calibration: Calibration, override: dict[str, float] | None = None) -> DeviceProfile:
        """The device as it really computes."""
        given = override or {}
        shares = {
            phase: given[phase] if phase in given else calibration.efficiency(self.key(spec, phase))
            for phase in ("decode", "prefill")
        }
        return device_profile(spec, self.model, shares["decode"], shares["prefill"])

    @property
    def kv_type(self) -> str:
        return "f16"


def prepare(row: Row) -> Case | Skip:
    """Read a row's words."""
    ask = question(row)
    if ask is None:
        return Skip(f"the metric '{row.metric}' in '{row.unit}' is not one that a cost model predicts")
    if not row.machines:
        return Skip("no machines are named")
    if row.num_machines > MAX_MACHINES or ask.batch > MAX_TOKENS or max(ask.prompt_tokens, ask.context_tokens) > MAX_TOKENS:
        return Skip("more machines, sessions or tokens than anybody has")
    devices: list[Device] = []
    for group in row.machines:
        spec = _spec(group)
        if spec is None:
            return Skip(f"the device '{group.device or 'without a name'}' is unknown and its memory bandwidth is not stated")
        devices += [Device(spec, group)] * group.count
    described = _describe(row)
    if isinstance(described, Skip):
        return described
    model, label = described
    link, inside = link_of(row.wires)
    return Case(row, ask, model, label, framework_of(row), tuple(devices), link, inside)


def _describe(row: Row) -> tuple[ModelDescription, str] | Skip:
    label = parse_quantization(row.quantization) if row.quantization else None
    if label is None:
        near = re.search(r"(\d+)[ -]?bit", row.quantization.lower())
        label = f"{near[1]}bit" if near else None
    if label is None and "buffer" in row.quantization.lower():
        label = "Q4_0"  # distributed-llama's only 4-bit format; only the buffer is named
    if label is None:
        return Skip(f"the quantization '{row.quantization or 'not stated'}' is unknown")
    try:
        return describe_preset(row.model, label, estimate_size=True), label
    except (ShardwiseError, ValueError) as error:
        return Skip(f"the model is unknown: {error}")


def _spec(group: Machines) -> DeviceSpec | None:
    """The catalog's figures, the row's own where it states some."""
    known = find_device(group.device)
    if known is None:
        if group.memory_bytes_per_s is None:
            return None
        kind = "cuda" if (group.flops_per_s or 0) > 3e12 else "cpu"
        return DeviceSpec(
            name=group.device.lower(),
            kind=kind,
            device_class=kind,
            memory_bytes=group.memory_bytes or 64e9,
            memory_bytes_per_s=group.memory_bytes_per_s,
            flops_per_s=group.flops_per_s or group.memory_bytes_per_s * 20,
        )
    return replace(
        known,
        memory_bytes_per_s=group.memory_bytes_per_s or known.memory_bytes_per_s,
        flops_per_s=group.flops_per_s or known.flops_per_s,
    )
