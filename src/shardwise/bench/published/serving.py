"""A pipeline that serves many users at once: what one token and one prompt take on their way, at the median and at p95.

A prompt at p95 is a long one; a token at p95 meets a prompt at two stages (its own and the next). Fails (with `Skip`) for
what depends on the arrivals and on the scheduler's queue, which no row states: means over such tails, throughput at saturation.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.bench.published.calibration import Calibration
from shardwise.bench.published.case import Case, Skip
from shardwise.bench.published.splits import shares
from shardwise.bench.published.steps import VRAM_SHARE, layer_bytes, layers_s, tiers
from shardwise.bench.published.wires import message_s
from shardwise.planner.cost_compute import StepShape

PROMPT_TOKENS, ANSWER_TOKENS = 763, 232  # means of the Azure conversation trace, which Helix's workloads are drawn from
_MEDIAN_PROMPT_TOKENS = 0.75 * PROMPT_TOKENS  # the trace is skewed: its median lies a quarter below its mean
_P95_PROMPT_TOKENS = 2 * PROMPT_TOKENS  # Helix leaves out prompts beyond 2,048
_PROMPTS_MET = 2
_ELEMENT_BYTES = 2.0
_OF_SEVERAL = ("separate", "sub-cluster")  # words for a pipeline of each kind of device
_QUEUE = "depends on arrivals and on the scheduler's queue, which the row does not state"


def serve(case: Case, calibration: Calibration) -> float | Skip:
    """The time of a token or of a prompt, in the row's unit."""
    ask = case.ask
    if ask.quantity == "serve_rate":
        return Skip(f"throughput at saturation {_QUEUE}")
    if ask.quantile not in ("p50", "p95"):
        return Skip(f"{ask.quantile or 'a mean'} of a serving system {_QUEUE}")
    tail = ask.quantile == "p95"
    prompt = StepShape.prefill(_P95_PROMPT_TOKENS if tail else _MEDIAN_PROMPT_TOKENS, 0, last=True)
    if ask.quantity == "serve_prompt":
        return ask.in_unit(_path_s(case, calibration, prompt, tail))
    mixed = len({d.spec.name for d in case.devices}) > 1
    if mixed and not any(word in case.row.strategy for word in _OF_SEVERAL):
        return Skip(f"tokens wait at the slowest stages of a mixed cluster under load: that {_QUEUE}")
    seconds = _path_s(case, calibration, StepShape.decode(batch_rows(case), PROMPT_TOKENS + ANSWER_TOKENS / 2), tail)
    if tail:
        usual = StepShape.prefill(_MEDIAN_PROMPT_TOKENS, 0, last=True)
        seconds += _PROMPTS_MET * _path_s(case, calibration, usual, tail) / stages_of(case)
    return ask.in_unit(seconds)


def stages_of(case: Case) -> int:
    """Stages that one token passes: as many as are needed to hold the model once."""
    if len(case.row.layers) > 1:
        return max(1, round(case.model.num_layers / _mean([b - a for a, b in case.row.layers])))
    one = _mean([d.vram_bytes for d in case.devices]) * 0.5  # half for weights, the rest for KV caches, as Helix and Swarm do
    return max(1, min(len(case.devices), -(-int(layer_bytes(case.model)) // int(one))))


def batch_rows(case: Case) -> float:
    """Sessions in one stage's step: all that the KV caches hold, spread over the stages."""
    context = PROMPT_TOKENS + ANSWER_TOKENS / 2
    copies = len(case.devices) / stages_of(case)
    free = sum(d.vram_bytes for d in case.devices) * VRAM_SHARE - copies * layer_bytes(case.model)
    sessions = max(1.0, free / copies / (case.model.kv_bytes_per_token() * context))
    return max(1.0, sessions / stages_of(case))


def _path_s(case: Case, calibration: Calibration, shape: StepShape, tail: bool = False) -> float:
    """Layers on the devices of one path, and a hop behind every stage."""
    kinds: dict[str, tuple[float, float]] = {}  # device -> (its memory, seconds of all layers)
    parts = {d.spec.name: tiers(case, d, calibration) for d in dict.fromkeys(case.devices)}
    for device in case.devices:
        whole_s = layers_s(case, parts[device.spec.name][0].profile, shape)
        kinds[device.spec.name] = (kinds.get(device.spec.name, (0.0, 0.0))[0] + device.vram_bytes, whole_s)
    if len(kinds) == 1:
        compute_s = next(iter(kinds.values()))[1]
    elif any(word in case.row.strategy for word in _OF_SEVERAL):
        return _of_several_s(case, calibration, shape, tail)
    elif len(case.devices) == len(case.row.layers) or not case.row.layers:
        weights = shares(case, [parts[d.spec.name] for d in case.devices])
        compute_s = sum(w * kinds[d.spec.name][1] for w, d in zip(weights, case.devices)) / sum(weights)
    else:
        compute_s = sum(m * s for m, s in kinds.values()) / sum(m for m, _ in kinds.values())
    size = shape.rows * case.model.hidden_size * _ELEMENT_BYTES
    return compute_s + stages_of(case) * (case.framework.hop_s + message_s(case.link, size))


def _of_several_s(case: Case, calibration: Calibration, shape: StepShape, tail: bool) -> float:
    """A pipeline for each kind of device: the fastest gives most of the tokens, the slowest the tail."""
    kinds = dict.fromkeys(d.spec.name for d in case.devices)
    parts = [replace(case, devices=tuple(d for d in case.devices if d.spec.name == kind)) for kind in kinds]
    seconds = [_path_s(part, calibration, shape) for part in parts]
    return max(seconds) if tail else min(seconds)


def _mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values) if values else 1.0
