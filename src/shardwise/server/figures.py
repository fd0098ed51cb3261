"""The deployment's figures per boundary, measured beside predicted, in the order of the ring; and what it may or may not know.

Boundary i is the hop from stage i to stage i + 1. Transfer times run from the sender's clock to the receiver's and are corrected
by the clock offsets that the driver has estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.planner.types import BoundaryPrediction, Prediction
from shardwise.records import replace
from shardwise.server.engine import Engine
from shardwise.transport.messages import Quantiles, Stats


@dataclass(frozen=True, slots=True)
class Boundary:
    """One hop. `transfer` and `copy` (on the sender) are of its messages, `wait` is the receiver's idle time before a step."""

    source: str
    target: str
    from_stage: int
    to_stage: int
    transfer: Quantiles
    copy: Quantiles
    wait: Quantiles
    sent_bytes: int
    bytes_per_token: float
    predicted: BoundaryPrediction | None


def context_tokens(engine: Engine) -> int:
    """Positions that one session may use."""
    options = getattr(engine, "options", None)
    return int(getattr(options, "context_tokens", 0) or engine.model.context_length)


def max_sessions(engine: Engine) -> int:
    """Sessions that run at the same time."""
    options = getattr(engine, "options", None)
    return int(getattr(options, "max_sessions", 1))


def boundaries(engine: Engine, stats: Sequence[Stats], predicted: Prediction | None) -> list[Boundary]:
    """All hops whose stages have figures."""
    nodes = {stage.index: stage.node for stage in engine.stages}
    by_stage = {one.stage: one for one in stats}
    predictions = predicted.boundaries if predicted is not None else ()
    offsets = _clock_offsets(engine)
    out = []
    for index in range(len(nodes) - 1):
        sender, receiver = by_stage.get(index), by_stage.get(index + 1)
        if sender is None or receiver is None:
            continue
        out.append(
            Boundary(
                source=nodes[index],
                target=nodes[index + 1],
                from_stage=index,
                to_stage=index + 1,
                transfer=_shifted(receiver.transfer, offsets.get(index + 1, 0.0) - offsets.get(index, 0.0)),
                copy=sender.copy,
                wait=receiver.wait,
                sent_bytes=sender.sent_bytes,
                bytes_per_token=sender.decode_sent_bytes / max(1, sender.decode_rows),
                predicted=predictions[index] if index < len(predictions) else None,
            )
        )
    return out


def _clock_offsets(engine: Engine) -> dict[int, float]:
    offsets = getattr(getattr(engine, "driver", None), "clock_offset_s", None)
    return dict(offsets) if isinstance(offsets, dict) else {}


def _shifted(value: Quantiles, shift_s: float) -> Quantiles:
    if not value.n:
        return value
    low = {name: max(0.0, getattr(value, name) - shift_s) for name in ("p50", "p95", "p99", "max")}
    return replace(value, **low)
