"""Which rates a device really reaches: measured ones first, a share of the vendor's figure otherwise.

In: `DeviceProfile` with its `RateTable`s. Out: `EffectiveRates` per quantization, and the fixed costs of the runtime.
Nothing fails: a rate of zero never gets here (the cluster file refuses it).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import lru_cache

from shardwise.machines.profile import HEAD_TABLE, DeviceProfile, LayerTiming, RateTable
from shardwise.records import Record

# What llama.cpp reaches of the stated figures where nothing was measured: (memory bandwidth in decode, compute in
# prefill, fixed seconds a layer). CPU: SmolLM2-135M on two Xeon cores against a triad; GPUs: the single-device rows of
# XiongjieDai/GPU-Benchmarks-on-LLM-Inference (8B, Q4_K_M: 0.55-0.7 of the bandwidth, 0.25-0.4 of dense fp16).
DEFAULT_EFFICIENCY = {
    "cpu": (0.70, 0.50, 12e-6),
    "cuda": (0.62, 0.35, 6e-6),
    "metal": (0.65, 0.45, 8e-6),
    "vulkan": (0.50, 0.25, 8e-6),
}


class RuntimeCosts(Record):
    """Fixed costs of our own runtime (ring of stage processes over ZeroMQ). The probe may replace them.

    Values: fits of short runs on two cores of an EPYC server, free of other work (`bench.prediction_calibration`).
    """

    step_overhead_s: float = 240e-6  # per step and stage: receive, decode the header, batch, call the backend with cold caches
    row_overhead_s: float = 8e-6  # per row and stage: segment book-keeping
    embed_row_s: float = 15e-6  # first stage: look one token's embedding up
    sample_row_s: float = 150e-6  # last stage: sample one row of logits
    message_overhead_s: float = 130e-6  # per hop where the link was not measured through the real transport
    header_bytes: int = 160  # MessagePack header of a step
    token_bytes: int = 4  # a token id on its way back to stage 0
    local_bytes_per_s: float = 2.5e9  # between two stages of one machine
    local_latency_s: float = 90e-6
    process_bytes: int = 67 * 2**20  # interpreter, libraries and the backend's own state, a worker
    vocab_token_bytes: int = 54  # last stage: one entry of the sampler's tables (the first grammar adds 900, once)
    stage_threads: int = 1  # cores that a computing stage keeps busy
    shared_speed: float = (
        1.0  # of each of two stages that compute on cores of their own in one machine: caches and memory are shared
    )
    message_cpu_s: float = 140e-6  # of a core of a shared machine, beside the stages: threads that move one message over a hop
    driver_cpu_s: float = 440e-6  # the same for the driver, a sampled token
    service_jitter: float = 0.04  # spread of one stage's step (standard deviation / mean) where none was measured


@dataclass(frozen=True, slots=True)
class EffectiveRates:
    """What one device does with one quantization."""

    weight_bytes_per_s: float
    flops_per_s: float
    layer_fixed_s: float
    row_s: float = 0.0
    timings: tuple[LayerTiming, ...] = ()
    timing_layer_bytes: int = 0
    spread: float = 0.0  # interquartile range / value
    attention_flops_per_s: float = 0.0  # 0 = as `flops_per_s`


def _from_table(table: RateTable, fixed_s: float) -> EffectiveRates:
    rate = table.weight_bytes_per_s
    return EffectiveRates(
        weight_bytes_per_s=rate.value,
        flops_per_s=table.compute_flops_per_s.value,
        layer_fixed_s=table.layer_fixed_s.value if table.layer_fixed_s else fixed_s,
        row_s=table.row_s.value if table.row_s else 0.0,
        timings=table.timings,
        timing_layer_bytes=table.timing_layer_bytes,
        spread=rate.spread / rate.value if rate.value else 0.0,
        attention_flops_per_s=table.attention_flops_per_s.value if table.attention_flops_per_s else 0.0,
    )


def _tables(device: DeviceProfile) -> list[RateTable]:
    """Those of weights."""
    return [t for t in device.rates if not t.quantization.startswith("KV_") and t.quantization != HEAD_TABLE]


def measured_quantizations(device: DeviceProfile) -> tuple[str, ...]:
    """What was measured on the device; `rates_for` takes the median of these for any other. Nothing = stated figures."""
    return tuple(table.quantization for table in _tables(device))


@lru_cache(maxsize=4096)
def rates_for(device: DeviceProfile, quantization: str) -> EffectiveRates:
    """Rates of `device` for weights stored as `quantization`.

    Measured for this quantization: taken. Measured for others only: the median of those (weights of another kind run
    at a similar rate a byte; compute does not depend on the bytes). Nothing measured: `DEFAULT_EFFICIENCY`.
    """
    memory_share, compute_share, fixed_s = DEFAULT_EFFICIENCY.get(device.kind, DEFAULT_EFFICIENCY["cpu"])
    tables = _tables(device)
    for table in tables:
        if table.quantization == quantization:
            return _from_table(table, fixed_s)
    if tables:
        known = [_from_table(t, fixed_s) for t in tables]
        return EffectiveRates(
            weight_bytes_per_s=statistics.median(r.weight_bytes_per_s for r in known),
            flops_per_s=statistics.median(r.flops_per_s for r in known),
            layer_fixed_s=statistics.median(r.layer_fixed_s for r in known),
            row_s=statistics.median(r.row_s for r in known),
            spread=max(r.spread for r in known),
        )
    return EffectiveRates(
        weight_bytes_per_s=device.memory_bytes_per_s.value * memory_share,
        flops_per_s=device.compute_flops_per_s.value * compute_share,
        layer_fixed_s=fixed_s,
    )


@lru_cache(maxsize=4096)
def kv_bytes_per_s(device: DeviceProfile, kv_type: str) -> float:
    """Rate at which decode reads the KV cache: measured (`KV_F16` ...), else as fast as weights at best."""
    wanted = f"KV_{kv_type.upper()}"
    for table in device.rates:
        if table.quantization == wanted:
            return table.weight_bytes_per_s.value
    memory_share, _, _ = DEFAULT_EFFICIENCY.get(device.kind, DEFAULT_EFFICIENCY["cpu"])
    return device.memory_bytes_per_s.value * memory_share


@lru_cache(maxsize=4096)
def timed_head(device: DeviceProfile) -> EffectiveRates | None:
    """The head's own timings, where a model's head was timed on this device."""
    return next((_from_table(table, 0.0) for table in device.rates if table.quantization == HEAD_TABLE), None)


def timed_layer_s(rates: EffectiveRates, rows: float) -> float | None:
    """Measured seconds of a layer for `rows` rows: linear between the measured row counts, by the last slope beyond."""
    points = rates.timings
    if not points:
        return None
    if rows <= points[0].rows or len(points) == 1:
        return points[0].layer_s.value
    index = next((i for i, point in enumerate(points) if rows <= point.rows), len(points) - 1)
    low, high = points[index - 1], points[index]
    slope = (high.layer_s.value - low.layer_s.value) / (high.rows - low.rows)
    return max(points[0].layer_s.value, low.layer_s.value + slope * (rows - low.rows))
