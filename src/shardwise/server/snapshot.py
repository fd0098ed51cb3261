"""The picture of a moment: nodes, stages, boundaries, requests, advice; plain data for the dashboard and for `shardwise top`.

Figures of the stages may be a little older than the rest (`stats_age_s`); where a stage does not answer they are kept and
shown as old, never made up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from shardwise.planner.types import Percentiles, Prediction
from shardwise.server.engine import Engine, Expectation
from shardwise.server.figures import Boundary, boundaries, context_tokens, max_sessions
from shardwise.transport.messages import Quantiles, Stats


def model_picture(engine: Engine) -> dict[str, Any]:
    """What runs."""
    model = engine.model
    return {
        "name": model.name,
        "architecture": model.architecture,
        "quantization": model.quantization,
        "num_layers": model.num_layers,
        "num_params": model.num_params,
        "weight_bytes": model.weight_bytes,
        "context_tokens": context_tokens(engine),
        "max_sessions": max_sessions(engine),
        "vocab_size": model.vocab_size,
        "revision_digest": model.revision_digest,
    }


def stage_pictures(engine: Engine, stats: Sequence[Stats]) -> list[dict[str, Any]]:
    """One a stage, in order."""
    by_stage = {one.stage: one for one in stats}
    capacity = max_sessions(engine) * context_tokens(engine)
    out = []
    for stage in engine.stages:
        one = by_stage.get(stage.index)
        picture: dict[str, Any] = {
            "index": stage.index,
            "node": stage.node or "this machine",
            "pid": stage.pid,
            "layers": list(stage.layers),
            "state": stage.state,
            "weight_bytes": stage.weight_bytes,
            "kv_bytes": stage.kv_bytes,
            "workspace_bytes": stage.workspace_bytes,
            "kv_capacity_tokens": capacity,
        }
        if one is not None:
            picture |= {
                "memory_bytes": one.memory_bytes,
                "peak_memory_bytes": one.peak_memory_bytes,
                "kv_tokens": one.kv_tokens,
                "sessions": one.sessions,
                "rows_per_step": one.decode_rows / one.decode.n if one.decode.n else None,
                "compute_s": _quantiles(one.decode),
                "wait_s": _quantiles(one.wait),
                "queue_s": _quantiles(one.queue),
                "prefill_tokens": one.prefill_tokens,
            }
        out.append(picture)
    return out


def node_pictures(stages: Sequence[dict[str, Any]], capacities: dict[str, int]) -> list[dict[str, Any]]:
    """Machines in order of first use; `capacity_bytes` is what the machine has for models, where that is known."""
    out: dict[str, dict[str, Any]] = {}
    for stage in stages:
        node = out.setdefault(
            stage["node"],
            {"name": stage["node"], "stages": [], "used_bytes": 0, "capacity_bytes": capacities.get(stage["node"]), "up": 0},
        )
        node["stages"].append(stage["index"])
        node["up"] += stage["state"] == "ready"
        node["used_bytes"] += stage["weight_bytes"] + stage["kv_bytes"] + stage["workspace_bytes"]
    return list(out.values())


def boundary_pictures(engine: Engine, stats: Sequence[Stats], predicted: Prediction | None) -> list[dict[str, Any]]:
    """One a hop, measured beside predicted."""
    return [_boundary(one) for one in boundaries(engine, stats, predicted)]


def expectation_picture(expectation: Expectation) -> dict[str, Any]:
    """`prediction` and `advice`, where there are any."""
    return {
        "prediction": None if expectation.prediction is None else msgspec.to_builtins(expectation.prediction),
        "advice": None if expectation.advice is None else msgspec.to_builtins(expectation.advice),
    }


def _boundary(one: Boundary) -> dict[str, Any]:
    guess = one.predicted
    return {
        "from_stage": one.from_stage,
        "to_stage": one.to_stage,
        "source": one.source or "this machine",
        "target": one.target or "this machine",
        "bytes_per_token": one.bytes_per_token,
        "sent_bytes": one.sent_bytes,
        "measured": {"transfer_s": _quantiles(one.transfer), "copy_s": _quantiles(one.copy), "wait_s": _quantiles(one.wait)},
        "predicted": None
        if guess is None
        else {
            "transfer_s": _percentiles(guess.transfer_s),
            "copy_s": _percentiles(guess.copy_s),
            "wait_s": _percentiles(guess.sync_wait_s),
        },
    }


def _quantiles(value: Quantiles) -> dict[str, float]:
    return {"p50": value.p50, "p95": value.p95, "p99": value.p99, "n": value.n}


def _percentiles(value: Percentiles) -> dict[str, float]:
    return {"p50": value.p50, "p95": value.p95, "p99": value.p99}
