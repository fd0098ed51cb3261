"""Which share of its vendor's figures each device reaches, from rows with one device only.

    single-device rows -> efficiencies per (device, kernels, phase, weights) -> what any row's devices really do

For a device without rows of its own: its class, from the rows of that class, otherwise the shipped table. Nothing fails.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shardwise.bench.published.frameworks import data
from shardwise.machines.devices import DeviceSpec
from shardwise.machines.profile import DeviceProfile, Measurement, RateTable
from shardwise.model.description import ModelDescription

_LOW, _HIGH, _STEPS = 0.003, 4.0, 40
_ODD = 3.0  # rows of one kind that differ by more from all rows of their device are a mistake, not a property
MOE_FIXED = 2.0  # a sparse layer runs about this many times the kernels: routing, gathering, several products


@dataclass(frozen=True, slots=True)
class Key:
    """What an efficiency belongs to."""

    device: str
    device_class: str
    kernels: str
    phase: str  # decode | prefill
    weights: str  # f16 | q8 | q4 | q1


@dataclass(frozen=True, slots=True)
class Sample:
    """One single-device row's verdict."""

    key: Key
    efficiency: float
    row_id: object
    source: str


def weights_family(label: str) -> str:
    """Quantization -> a family with a similar rate a byte."""
    name = label.upper()
    if name in ("F16", "BF16", "F32"):
        return "f16"
    if any(word in name for word in ("8", "INT8")):
        return "q8"
    return "q1" if any(word in name for word in ("IQ1", "IQ2", "TQ", "Q2")) else "q4"


def invert(seconds_for: Callable[[float], float], measured_s: float) -> float | None:
    """The efficiency with which `seconds_for` gives what was measured; None beyond sense. More is faster."""
    low, high = _LOW, _HIGH
    if not seconds_for(high) <= measured_s <= seconds_for(low):
        return None
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if seconds_for(middle) > measured_s else (low, middle)
    return math.sqrt(low * high)


def shipped(key: Key) -> float:
    """The table's value."""
    table = data("efficiencies.toml")
    base = table["class"].get(key.device_class, table["class"]["cuda"])[key.phase]
    kernels = table["kernels"].get(key.kernels, table["kernels"]["ggml"])[key.phase]
    return float(base * kernels * table["weights"][key.weights][key.phase])


@dataclass(slots=True)
class Calibration:
    """Efficiencies of every device; `without` leaves rows out, so that no row explains itself."""

    samples: list[Sample] = field(default_factory=list)

    def without(self, *, row_id: object = None, source: str | None = None) -> Calibration:
        """The same without one row, or without everything from one source."""
        kept = [s for s in self.samples if s.row_id != row_id or row_id is None]
        return Calibration([s for s in kept if source is None or s.source != source])

    def efficiency(self, key: Key) -> float:
        """Own rows; own rows of other weights or kernels, put into proportion; the class; the table."""
        groups = list(self._relative(lambda s: s.key.device == key.device and s.key.phase == key.phase, key))
        usual = statistics.median(groups[-1]) if groups[-1] else 1.0
        for ratios in groups:
            if ratios and 1 / _ODD < statistics.median(ratios) / usual < _ODD:
                return statistics.median(ratios) * shipped(key)
        same = [
            s
            for s in self.samples
            if s.key.device_class == key.device_class and s.key.phase == key.phase and s.key.kernels == key.kernels
        ]
        by_device: dict[tuple[str, bool], list[float]] = defaultdict(list)
        for s in same:
            by_device[s.key.device, s.key.weights == key.weights].append(s.efficiency / shipped(s.key))
        for exact in (True, False):
            ratios = [statistics.median(found) for (_, is_same), found in by_device.items() if is_same or not exact]
            if len(ratios) >= 2:
                return statistics.median(ratios) * shipped(key)
        return shipped(key)

    def _relative(self, mine: Callable[[Sample], bool], key: Key) -> Iterable[list[float]]:
        own = [s for s in self.samples if mine(s)]
        exact = [s for s in own if s.key == key]
        kernels = [s for s in own if s.key.kernels == key.kernels]
        if len(own) == 2:  # of two that contradict each other nobody can tell which is right: the class decides
            pair = sorted(s.efficiency / shipped(s.key) for s in own)
            if pair[1] / pair[0] > _ODD:
                exact = kernels = own = []
        for chosen in (exact, kernels, own):
            yield [s.efficiency / shipped(s.key) for s in chosen]


def fixed_s(spec: DeviceSpec, model: ModelDescription) -> float:
    """Seconds of a layer that are not its weights."""
    table = data("efficiencies.toml")["class"]
    sparse = any(layer.experts is not None for layer in model.layers)
    return float(table.get(spec.device_class, table["cuda"])["fixed_s"]) * (MOE_FIXED if sparse else 1.0)


def device_profile(spec: DeviceSpec, model: ModelDescription, decode: float, prefill: float) -> DeviceProfile:
    """The device at these efficiencies, as the planner knows devices: a rate table for each quantization of the model."""
    kinds = sorted({t.quantization for t in model.all_tensors()})
    rates = tuple(
        RateTable(
            quantization=kind,
            library="published",
            compute_flops_per_s=Measurement(value=spec.flops_per_s * prefill),
            weight_bytes_per_s=Measurement(value=spec.memory_bytes_per_s * decode),
            layer_fixed_s=Measurement(value=fixed_s(spec, model)),
        )
        for kind in kinds
    )
    return DeviceProfile(
        kind=spec.kind,
        name=spec.name,
        memory_bytes=round(spec.memory_bytes),
        memory_bytes_per_s=Measurement(value=spec.memory_bytes_per_s),
        compute_flops_per_s=Measurement(value=spec.flops_per_s),
        rates=rates,
    )
