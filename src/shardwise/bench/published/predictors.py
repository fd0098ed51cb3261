"""The formulas: a `Case` and a `Calibration` give seconds (or bytes). Every one is built from the planner's cost model.

Fails when a quantity has no formula for the row's strategy: `Skip` with the reason; nothing is raised.
"""

from __future__ import annotations

import re

from shardwise.bench.published.calibration import Calibration
from shardwise.bench.published.case import Case, Skip
from shardwise.bench.published.serving import ANSWER_TOKENS, PROMPT_TOKENS, serve
from shardwise.bench.published.splits import shares
from shardwise.bench.published.steps import ends_s, launch_s, layers_s, share_s, tiers
from shardwise.bench.published.wires import collective_s, message_s
from shardwise.machines.profile import DeviceProfile
from shardwise.planner.cost_compute import StepShape, layer_s

Override = dict[str, float]
Q80_BYTES = 34 / 32
_CPU_HEAD_BYTES_PER_S = 40e9  # an 8-core server's memory, for a client that keeps the head on its CPU
_PETALS_FORWARD_TOKENS = 128  # a sequence of the "parallel forward" test (arXiv 2209.01188, table 3)


def predict_case(case: Case, calibration: Calibration, override: Override | None = None) -> float | Skip:
    """The row's value in the row's own unit."""
    ask = case.ask
    if ask.quantity == "decode":
        return ask.in_unit(decode_s(case, calibration, override), _tokens_out(case))
    if ask.quantity == "prefill":
        return ask.in_unit(prefill_s(case, calibration, override), ask.prompt_tokens)
    if ask.quantity == "first_token":
        return ask.in_unit(prefill_s(case, calibration, override) + case.framework.request_s)
    if ask.quantity in ("layer_decode", "layer_prefill"):
        return ask.in_unit(layer_time_s(case, calibration, override))
    if ask.quantity == "forward":
        return forward(case, calibration)
    if ask.quantity == "sync_bytes":
        return ask.in_unit(sync_bytes(case)) if case.framework.name == "dllama" else _no("bytes of this program's syncs")
    if ask.quantity == "memory":
        return ask.in_unit(memory_bytes(case))
    return serve(case, calibration)


def _tokens_out(case: Case) -> float:
    """An aggregate rate counts every session's tokens."""
    return float(case.ask.batch) if case.ask.inverse and "aggregate" in case.row.metric else 1.0


def _no(what: str) -> Skip:
    return Skip(f"no formula for {what}")


def decode_s(case: Case, calibration: Calibration, override: Override | None = None) -> float:
    """Seconds of one decode step of `batch` sessions."""
    shape = StepShape.decode(case.ask.batch, case.ask.context_tokens)
    if case.strategy == "tensor":
        return _tensor_s(case, calibration, shape)
    return _pipeline_s(case, calibration, shape, override)


def prefill_s(case: Case, calibration: Calibration, override: Override | None = None) -> float:
    """Seconds of a prompt, chunk by chunk; programs that overlap chunks over devices do so."""
    tokens, chunk = max(1.0, case.ask.prompt_tokens), float(case.framework.batch)
    total, at, sizes = 0.0, 0.0, []
    while at < tokens:
        now = min(chunk, tokens - at)
        shape = StepShape.prefill(now, case.ask.context_tokens + at, last=at + now >= tokens)
        step = _tensor_s if case.strategy == "tensor" else None
        seconds = step(case, calibration, shape) if step else _pipeline_s(case, calibration, shape, override)
        sizes.append(seconds)
        at += now
    total = sum(sizes) * case.ask.batch
    devices = len(case.devices)
    if case.strategy == "pipeline" and len(sizes) > 1 and (case.framework.overlap or "async" in case.row.strategy):
        return total * (1 + (len(sizes) - 1) / devices) / len(sizes)
    return total


def _pipeline_s(case: Case, calibration: Calibration, shape: StepShape, override: Override | None = None) -> float:
    parts = [tiers(case, device, calibration, override) for device in case.devices]
    split = shares(case, parts)
    seconds = sum(share_s(case, d, p, s, shape) for d, p, s in zip(case.devices, parts, split) if s > 0)
    last = max(i for i, s in enumerate(split) if s > 0)
    seconds += _head_s(case, parts[last][0].profile, shape)
    used = sum(1 for s in split if s > 0)
    every = "every device" in case.row.strategy or "without" in case.row.strategy or "v1" in case.row.strategy
    stages = len(case.devices) if every else used
    return seconds + hops_s(case, stages, shape)


def _head_s(case: Case, profile: DeviceProfile, shape: StepShape) -> float:
    if "lm head on" in case.row.strategy or case.framework.name == "petals":
        model = case.model
        return 2.0 * model.vocab_size * model.hidden_size / _CPU_HEAD_BYTES_PER_S * min(1.0, shape.sampled_rows)
    return ends_s(case, profile, shape)


def hops_s(case: Case, stages: int, shape: StepShape) -> float:
    """All boundaries of a step: to the next device, and back where a network lies between."""
    remote = "fully remote" in case.row.strategy or "all layers on remote" in case.row.strategy
    if stages < 2 and not remote and "rpc" not in case.row.strategy:
        return 0.0
    program = case.framework
    if case.inside and "rpc" not in case.row.strategy:
        size = shape.rows * case.model.hidden_size * 4.0
        return (stages - 1) * (program.local_hop_s + message_s(case.link, size))
    element = 1.0 if program.name == "petals" and shape.rows > 1 else 2.0 if program.name == "petals" else 4.0
    size = shape.rows * case.model.hidden_size * element + program.hop_bytes
    hop = program.local_hop_s if case.inside else program.hop_s
    count = stages + 1 if program.name == "petals" else max(1, stages - 1) if "rpc" in program.name else stages
    back = case.model.vocab_size * 4.0 / case.link.bytes_per_s.value if "host has no gpu" in case.row.strategy else 0.0
    return count * (hop + message_s(case.link, size)) + back


def _tensor_s(case: Case, calibration: Calibration, shape: StepShape) -> float:
    """The slowest rank with its share, and two all-reduces a layer (Megatron-LM, arXiv 1909.08053)."""
    ranks = len(case.devices)
    slowest = 0.0
    for device in dict.fromkeys(case.devices):
        profile = case.profile(device.spec, calibration)
        floor = launch_s(case, profile)
        layers = case.model.num_layers
        fixed = layers * profile.rates[0].layer_fixed_s.value if profile.rates[0].layer_fixed_s else 0.0
        whole = layers_s(case, profile, shape)
        seconds = fixed + max(layers * floor, (whole - fixed) / ranks) + ends_s(case, profile, shape) / ranks
        slowest = max(slowest, seconds)
    return slowest + syncs_s(case, shape)


def syncs_s(case: Case, shape: StepShape) -> float:
    """All syncs of one step."""
    ranks, layers, program = len(case.devices), case.model.num_layers, case.framework
    if program.name == "dllama":  # a star: the root talks to every worker in turn, four exchanges a layer
        rounds = layers * 4 * (case.link.latency_s.value + (ranks - 1) * program.sync_s)
        return rounds + shape.rows * sync_bytes(case) / case.link.bytes_per_s.value
    size = shape.rows * case.model.hidden_size * 2.0
    return 2 * layers * collective_s(case.link, ranks, size, program.sync_s)


def sync_bytes(case: Case) -> float:
    """Bytes that distributed-llama's root and workers exchange for a token.

    Since 0.3 four vectors of the hidden size a layer and worker; 0.1 sent queries, keys, values and the inner vector
    of the MLP too (report.pdf, section 4; its tables agree within 5 %). Buffers are f32 or Q80 (34 bytes for 32 values).
    """
    words = case.row.quantization.lower()
    element = 4.0 if "f32 buffer" in words or "f32 sync" in words else Q80_BYTES
    workers, layers, hidden = len(case.devices) - 1, case.model.num_layers, case.model.hidden_size
    if "v0.1" not in case.row.strategy or "v0.10" in case.row.strategy:
        return layers * workers * 4 * hidden * element * 1.024  # its kB are 1024 bytes
    inner = max(max(t.shape) for t in case.model.layers[0].tensors if len(t.shape) > 1) / hidden
    kv = case.model.layers[0].kv.elements_per_token() / hidden
    sent, returned = 3 + inner, (3 + kv) * workers / (workers + 1)
    return layers * hidden * element * (workers * sent + returned)


def layer_time_s(case: Case, calibration: Calibration, override: Override | None = None) -> float:
    """One layer alone, as a profiler times its kernels: no program around it."""
    tokens = case.ask.prompt_tokens if case.ask.quantity == "layer_prefill" else case.ask.batch
    profile = case.profile(case.devices[0].spec, calibration, override)
    context = PROMPT_TOKENS + ANSWER_TOKENS / 2 if case.framework.name in ("vllm", "helix") else 0.0
    shape = StepShape.prefill(tokens, 0) if case.ask.quantity == "layer_prefill" else StepShape.decode(_rows(case), context)
    return layer_s(case.model.layers[-1], profile, shape)


def _rows(case: Case) -> float:
    match = re.search(r"tokens?(\d+)", case.row.metric)
    return float(match[1]) if match else float(case.ask.batch)


def forward(case: Case, calibration: Calibration) -> float | Skip:
    """A forward pass of a batch of sequences through a pipeline, all tokens at once."""
    if case.framework.name != "petals":
        return _no("a forward pass whose length is not stated")
    tokens = case.ask.batch * _PETALS_FORWARD_TOKENS
    shape = StepShape(tokens, case.ask.batch, _PETALS_FORWARD_TOKENS, tokens * _PETALS_FORWARD_TOKENS / 2, 1.0)
    return case.ask.in_unit(_pipeline_s(case, calibration, shape), tokens)


def memory_bytes(case: Case) -> float:
    """Weights and KV of the fullest device."""
    positions = case.ask.context_tokens if case.row.context != "0 tokens" else 0.0
    kv = positions * case.model.kv_bytes_per_token() * case.ask.batch
    return (case.model.weight_bytes + kv) / len(case.devices)
