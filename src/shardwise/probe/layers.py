"""One real layer through the real backend: rates per quantization, the heart of a profile (ADR 0002).

Slices (synthetic, or cut from the user's own model) flow into a process each; timings come back and become a
`RateTable`. **Fails with** `StageLoadFailed` (the backend does not run here, with its last words) or `ReplyTimeout`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.clock import Clock
from shardwise.cluster.spawn import UNSET, start_child
from shardwise.errors import ReplyTimeout, StageLoadFailed
from shardwise.machines.profile import LayerTiming, Measurement, RateTable
from shardwise.model.description import ModelDescription
from shardwise.probe.layer_task import LayerResult, LayerTask, RowSamples
from shardwise.probe.statistics import measurement
from shardwise.probe.synthetic import KV_HEAVY, SMALL, TYPICAL, LayerShape, write_layers
from shardwise.records import from_json, to_json
from shardwise.shards.slicing import slice_model

_COMMAND = ("-m", "shardwise.cluster.child", "shardwise.probe.layer_process")
_LONG, _SHORT = 3, 1
_SMALL_LONG = 33
_KV_CONTEXT_TOKENS = 2048
_KV_ROWS = 64


def _spawn() -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if k not in UNSET}
    command = [sys.executable, *_COMMAND]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


def run_task(task: LayerTask, timeout_s: float | None = None) -> LayerResult:
    """Run one task in its process; `ReplyTimeout` after `timeout_s` (default: a minute and ten times its budget)."""
    process = start_child(_spawn)
    timeout_s = timeout_s or 60 + 10 * task.budget_s
    try:
        out, log = process.communicate(to_json(task), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise ReplyTimeout(f"the layer probe took more than {timeout_s:g} s", where=task.quantization) from None
    if process.returncode:
        words = log.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        raise StageLoadFailed(f"the layer probe ended with {process.returncode}: {words[0]}", where=task.quantization)
    return from_json(out, LayerResult, where="layer probe")


def synthetic_rates(
    quantization: str, *, threads: int, budget_s: float, fixed_s: Measurement | None, clock: Clock, gpu_layers: int = 0
) -> RateTable:
    """Rates of one quantization from layers of a typical shape."""
    result = _time_synthetic(TYPICAL, _LONG, quantization, threads, budget_s=budget_s, gpu_layers=gpu_layers)
    layer_bytes = TYPICAL.layer_bytes(quantization)
    return rate_table(quantization, result, layer_bytes, 2.0 * TYPICAL.num_weights, fixed_s, "synthetic layer", clock)


def fixed_layer_cost(*, threads: int, budget_s: float, clock: Clock, gpu_layers: int = 0) -> Measurement:
    """Seconds of a layer that are not its weights: from layers so small that nothing else is left."""
    more = {"budget_s": budget_s, "gpu_layers": gpu_layers, "decode_rows": (1,), "prefill_rows": ()}
    result = _time_synthetic(SMALL, _SMALL_LONG, "Q8_0", threads, **more)
    return measurement(result.rows[0].layer_s, f"layers of {SMALL.hidden}", clock)


def kv_rates(
    kv_type: str, element_bytes: float, *, threads: int, budget_s: float, clock: Clock, gpu_layers: int = 0
) -> RateTable:
    """What the KV cache costs: a row, and a chunk, after many positions against the same after none.

    Bytes/s are of decode, FLOP/s of a chunk's attention (scores and values: 4 x hidden a row and position).
    `StageLoadFailed` where the difference is lost in noise.
    """
    rows = {"decode_rows": (1,), "prefill_rows": (_KV_ROWS, 256), "far_prefill_rows": _KV_ROWS}
    more = {"budget_s": budget_s, "kv_type": kv_type, "context_tokens": _KV_CONTEXT_TOKENS, "gpu_layers": gpu_layers}
    result = _time_synthetic(KV_HEAVY, _LONG, "Q8_0", threads, **rows, **more)
    return kv_table(kv_type, element_bytes, result, clock)


def kv_table(kv_type: str, element_bytes: float, result: LayerResult, clock: Clock) -> RateTable:
    """The rates from the timings of `kv_rates`."""
    read_bytes = KV_HEAVY.kv_bytes_per_token(element_bytes) * _KV_CONTEXT_TOKENS
    flops = 4.0 * KV_HEAVY.hidden * _KV_ROWS * _KV_CONTEXT_TOKENS
    one, chunk = (next(found.layer_s for found in result.rows if found.rows == rows) for rows in (1, _KV_ROWS))
    method = f"after {_KV_CONTEXT_TOKENS} positions"
    return RateTable(
        quantization=f"KV_{kv_type.upper()}",
        library=_library(result),
        compute_flops_per_s=_extra_rate(flops, result.far_prefill_layer_s, chunk, f"{_KV_ROWS} rows {method}", clock),
        weight_bytes_per_s=_extra_rate(read_bytes, result.far_layer_s, one, f"decode {method}", clock),
    )


def _extra_rate(amount: float, far_s: Sequence[float], near_s: Sequence[float], method: str, clock: Clock) -> Measurement:
    """What the longer time did more, by the time that it took more; samples shorter than the median of `near_s` say nothing."""
    base_s = statistics.median(near_s)
    if statistics.median(far_s) <= base_s:
        raise StageLoadFailed("the KV cache's rate is lost in the noise", where=method, hint="probe again on a quiet machine")
    return measurement([amount / (each_s - base_s) for each_s in far_s if each_s > base_s], method, clock)


def model_rates(model: ModelDescription, folder: Path, *, threads: int, budget_s: float, clock: Clock) -> RateTable:
    """Rates from real layers of the user's own model, cut by the real slicer."""
    source = Path(model.source.paths[0])
    end = min(_LONG, model.num_layers - 1)
    layers = model.layers[_SHORT:end]
    quantization = dominant_quantization(model)
    task = LayerTask(
        short=slice_model(source, 0, _SHORT, folder / "short"),
        long=slice_model(source, 0, end, folder / "long"),
        quantization=quantization,
        threads=threads,
        budget_s=budget_s,
    )
    result = run_task(task)
    layer_bytes = round(statistics.mean(layer.weight_bytes for layer in layers))
    flops = statistics.mean(layer.flops_per_token for layer in layers)
    return rate_table(quantization, result, layer_bytes, flops, None, f"layers of {model.source.reference}", clock)


def dominant_quantization(model: ModelDescription) -> str:
    """The one that most bytes of the layers have."""
    totals: dict[str, int] = {}
    for layer in model.layers:
        for name, num_bytes in layer.weight_bytes_by_quantization.items():
            totals[name] = totals.get(name, 0) + num_bytes
    return max(totals, key=lambda name: totals[name]) if totals else model.quantization


def rate_table(
    quantization: str,
    result: LayerResult,
    layer_bytes: int,
    flops_per_row: float,
    fixed_s: Measurement | None,
    method: str,
    clock: Clock,
) -> RateTable:
    """Timings as they are, and the two rates that follow: bytes/s of one row, FLOP/s of the longest chunk."""
    fixed = fixed_s.value if fixed_s is not None else 0.0
    one, most = result.rows[0], result.rows[-1]
    timings = tuple(
        LayerTiming(rows=row.rows, layer_s=measurement(row.layer_s, method, clock)) for row in _increasing(result.rows)
    )
    return RateTable(
        quantization=quantization,
        library=_library(result),
        compute_flops_per_s=measurement([flops_per_row * most.rows / s for s in most.layer_s], method, clock),
        weight_bytes_per_s=measurement([layer_bytes / max(s - fixed, s / 2) for s in one.layer_s], method, clock),
        layer_fixed_s=fixed_s,
        timings=timings,
        timing_layer_bytes=layer_bytes,
    )


def _increasing(rows: tuple[RowSamples, ...]) -> list[RowSamples]:
    return sorted(rows, key=lambda row: row.rows)


def _time_synthetic(shape: LayerShape, num_layers: int, quantization: str, threads: int, **more: Any) -> LayerResult:
    """Write a short and a long file and time them."""
    with tempfile.TemporaryDirectory(prefix="shardwise-probe-") as folder:
        short = write_layers(Path(folder) / "short.gguf", shape, quantization, _SHORT)
        long = write_layers(Path(folder) / "long.gguf", shape, quantization, num_layers)
        return run_task(LayerTask(short=short, long=long, quantization=quantization, threads=threads, **more))


def _library(result: LayerResult) -> str:
    base = result.library.removesuffix(" openblas")
    return f"{base} openblas" if result.blas else base
