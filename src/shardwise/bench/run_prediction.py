"""A prediction for a run on this machine: rates from the cache, or from a probe of about two seconds, once a model.

**Promises** never an error: where this machine cannot be measured in time there is no prediction and a reason.
**Called by** `cli.generation`.
"""

from __future__ import annotations

from typing import Any

from shardwise.clock import SystemClock
from shardwise.cluster.machine import usable_memory_bytes
from shardwise.deploy.options import RunOptions, main_quantization
from shardwise.deploy.predict import as_document, predict_run
from shardwise.errors import ShardwiseError
from shardwise.machines.profile import NodeProfile
from shardwise.model.description import ModelDescription
from shardwise.probe.for_model import ModelProbe, model_rates
from shardwise.processors import usable_cores
from shardwise.shards.cache_folder import default_cache

PROBE_BUDGET_S, PROBE_TIMEOUT_S = 1.0, 8.0
BEYOND_CACHES_BYTES = 64 * 2**20  # layers that stay in the caches look a third faster than those of a stage


def predict_local(
    model: ModelDescription, options: RunOptions, *, prompt_tokens: int, output_tokens: int
) -> tuple[dict[str, Any] | None, str]:
    """(`predicted` of `run --json` or None, why there is none)."""
    if options.gpu_layers:
        return None, "only stages on the CPU are predicted"
    try:
        node = own_node(model, options)
        found = predict_run(model, options, node, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    except ShardwiseError as error:
        return None, error.one_line()
    return as_document(found), ""


def probe_layers(model: ModelDescription) -> int:
    """Layers to time together: more than caches hold, two at least."""
    layer_bytes = max(1, model.layers[0].weight_bytes)
    return max(2, -(-BEYOND_CACHES_BYTES // layer_bytes))


def own_node(model: ModelDescription, options: RunOptions) -> NodeProfile:
    """This machine, with what it does with this model."""
    probe = ModelProbe(
        threads=options.threads_here(len(options.layer_counts(model))),
        budget_s=PROBE_BUDGET_S,
        layers=probe_layers(model),
        decode_rows=(1,),
        prefill_rows=(options.chunk(main_quantization(model)), 32, 64),  # BLAS takes over at 32
        context_tokens=256,
        kv_type=options.kv_type,
        timeout_s=PROBE_TIMEOUT_S,
    )
    rates = model_rates(model, probe, default_cache(), SystemClock())
    return NodeProfile(
        name="local",
        memory_bytes=usable_memory_bytes(),
        memory_bytes_per_s=rates[0].weight_bytes_per_s,
        compute_flops_per_s=rates[0].compute_flops_per_s,
        num_cores=usable_cores(),
        machine="local",
        rates=rates,
    )
