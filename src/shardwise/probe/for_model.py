"""What this machine does with one model: real layers cut from it, its KV cache, its attention; cached by what it depends on.

    model -> slices -> layers and head timed in a process of their own -> RateTables (layers, KV, head) -> cache

**Promises** a second call with the same model, processor, threads and library costs a file read. **Fails with** the errors of
the layer probe, `UsageError` where the model has no file. **Called by** `run` (quick) and the prediction matrix (long).
"""

from __future__ import annotations

import statistics
from pathlib import Path

from shardwise.clock import Clock
from shardwise.errors import UsageError
from shardwise.machines.profile import HEAD_TABLE, Measurement, RateTable
from shardwise.machines.profile_cache import ProfileCache, RateKey
from shardwise.model.description import ModelDescription
from shardwise.probe.layer_task import LayerResult, LayerTask
from shardwise.probe.layers import dominant_quantization, rate_table, run_task
from shardwise.probe.node import cpu_model
from shardwise.probe.statistics import measurement
from shardwise.records import Record, replace
from shardwise.shards.slicing import slice_model
from shardwise.stage.llama import library


class ModelProbe(Record):
    """How long and how much."""

    threads: int = 1
    budget_s: float = 0.8
    layers: int = 4  # timed together
    decode_rows: tuple[int, ...] = (1, 2, 4)
    prefill_rows: tuple[int, ...] = (128,)
    context_tokens: int = 512
    kv_type: str = "f16"
    fresh: bool = False
    timeout_s: float | None = None
    kernel: str = "quick, with head"  # names the method in the cache


def model_rates(model: ModelDescription, probe: ModelProbe, cache_folder: Path, clock: Clock) -> tuple[RateTable, ...]:
    """(rates of the layers, of the KV cache, of the head), measured or from the cache."""
    if not model.source.paths or model.num_layers < 3:
        raise UsageError(f"{model.name} has no layers here to measure", where="probe")
    cache = ProfileCache(cache_folder / "rates")
    quantization = dominant_quantization(model)
    key = RateKey(
        device=f"cpu {cpu_model()} {probe.threads} threads",
        quantization=f"{quantization} of {model.revision_digest} {probe.kv_type} {probe.prefill_rows} {probe.layers} layers",
        library=library.describe(),
        kernel=probe.kernel,
    )
    keys = [replace(key, quantization=f"{part}{key.quantization}") for part in ("", "KV ", "HEAD ")]
    known = [None] * len(keys) if probe.fresh else [cache.get(each) for each in keys]
    if None in known:
        tables = measure(model, probe, cache_folder / "probe-slices" / model.revision_digest[:16], clock)
        for each, table in zip(keys, tables, strict=True):
            cache.put(each, table)
        return tables
    return tuple(table for table in known if table is not None)


def measure(model: ModelDescription, probe: ModelProbe, folder: Path, clock: Clock) -> tuple[RateTable, ...]:
    """Time real layers of `model`, and its head."""
    source = Path(model.source.paths[0])
    last = model.num_layers
    end = min(1 + probe.layers, last - 1)
    quantization = dominant_quantization(model)
    before_last = slice_model(source, last - 2, last - 1, folder / "before-last")
    task = LayerTask(
        short=slice_model(source, 0, 1, folder / "first"),
        long=slice_model(source, 0, end, folder / f"first-{end}"),
        quantization=quantization,
        threads=probe.threads,
        budget_s=probe.budget_s,
        decode_rows=probe.decode_rows,
        prefill_rows=probe.prefill_rows,
        context_tokens=probe.context_tokens,
        far_prefill_rows=probe.prefill_rows[0],
        kv_type=probe.kv_type,
        head=(before_last, slice_model(source, last - 1, last, folder / "last")),
    )
    result = run_task(task, probe.timeout_s)
    layers = model.layers[1:end]
    layer_bytes = round(statistics.mean(layer.weight_bytes for layer in layers))
    flops = statistics.mean(layer.flops_per_token for layer in layers)
    method = f"layers of {model.source.reference}"
    table = rate_table(quantization, result, layer_bytes, flops, None, method, clock)
    layers_table = replace(table, attention_flops_per_s=_attention(model, task, result, clock))
    return layers_table, _kv(model, task, result, clock), _head(model, result, clock)


def _head(model: ModelDescription, result: LayerResult, clock: Clock) -> RateTable:
    """The head by rows: two rows may cost far more than twice one (other kernels)."""
    method = f"head of {model.source.reference}"
    shaped = replace(result, rows=result.head)
    table = rate_table("HEAD", shaped, model.head_bytes, model.head_flops_per_token, None, method, clock)
    return replace(table, quantization=HEAD_TABLE)


def _kv(model: ModelDescription, task: LayerTask, result: LayerResult, clock: Clock) -> RateTable:
    """Bytes/s of reading the cache: a row after many positions against a row after none."""
    read = model.layers[1].kv.bytes_per_token(task.kv_type) * task.context_tokens
    near_s = statistics.median(result.rows[0].layer_s)
    extra_s = max(1e-8, statistics.median(result.far_layer_s) - near_s)
    rate = measurement([read / extra_s], f"decode after {task.context_tokens} positions", clock)
    return RateTable(
        quantization=f"KV_{task.kv_type.upper()}", library=result.library, compute_flops_per_s=rate, weight_bytes_per_s=rate
    )


def _attention(model: ModelDescription, task: LayerTask, result: LayerResult, clock: Clock) -> Measurement:
    """FLOP/s of scores and values in a prompt's chunk."""
    near_s = statistics.median(next(r.layer_s for r in result.rows if r.rows == task.far_prefill_rows))
    extra_s = max(1e-8, statistics.median(result.far_prefill_layer_s) - near_s)
    flops = task.far_prefill_rows * task.context_tokens * model.layers[1].attention_flops_per_position
    return measurement([flops / extra_s], f"a chunk after {task.context_tokens} positions", clock)
