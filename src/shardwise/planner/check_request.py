"""Refuses requests that contradict themselves before anything is computed; `UsageError` names field, value, the allowed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

from shardwise.errors import UsageError
from shardwise.model.description import KV_TYPE_BYTES
from shardwise.planner.types import OBJECTIVES, STRATEGIES, WIRE_DTYPE_BYTES, PlanRequest


def _choice(field: str, value: str, allowed: Iterable[str]) -> None:
    words = list(allowed)
    if value not in words:
        near = difflib.get_close_matches(value, words, n=1)
        hint = (f"did you mean '{near[0]}'? " if near else "") + f"allowed: {', '.join(words)}"
        raise UsageError(f"{field} = {value!r} is unknown", where="plan request", hint=hint, field=field, value=value)


def _at_least(field: str, value: float, least: float) -> None:
    if not math.isfinite(value) or value < least:
        raise UsageError(
            f"{field} = {value!r} is too small", where="plan request", hint=f"at least {least:g}", field=field, value=value
        )


def check_request(request: PlanRequest) -> None:
    """Words, counts, and that model and workload agree."""
    work, limits = request.workload, request.limits
    _choice("objective", request.objective.kind, OBJECTIVES)
    _choice("kv_type", work.kv_type, KV_TYPE_BYTES)
    for strategy in request.strategies:
        _choice("strategy", strategy, STRATEGIES)
    for dtype in request.wire_dtypes:
        _choice("wire_dtype", dtype, WIRE_DTYPE_BYTES)
    for field, least in (("prompt_tokens", 1), ("output_tokens", 1), ("num_users", 1), ("prefill_chunk_tokens", 1)):
        _at_least(field, getattr(work, field), least)
    if not math.isfinite(request.time_limit_s) or request.time_limit_s <= 0:
        raise UsageError(f"time_limit = {request.time_limit_s!r} s is not allowed", where="plan request", hint="above 0")
    if not 0 <= request.objective.weight <= 1:
        raise UsageError(f"weight = {request.objective.weight!r} is not allowed", where="plan request", hint="0 to 1")
    if not 0 < limits.memory_fraction <= 1:
        raise UsageError(
            f"memory_fraction = {limits.memory_fraction!r} is not allowed", where="plan request", hint="above 0, at most 1"
        )
    if not request.strategies or not request.wire_dtypes:
        raise UsageError("no strategy or wire dtype to choose from", where="plan request", hint="name at least one")
    _check_context(request)
    if not request.cluster.nodes:
        raise UsageError("the cluster has no machines", where="plan request", hint="describe at least one [[node]]")
    if request.model.num_layers < 1:
        raise UsageError(f"'{request.model.name}' has no layers to place", where="model")


def _check_context(request: PlanRequest) -> None:
    work, most = request.workload, request.model.context_length
    wanted = max(work.reserved_tokens, work.prompt_tokens + work.output_tokens)
    if most and wanted > most:
        raise UsageError(
            f"{wanted} tokens of context are beyond the {most} of '{request.model.name}'",
            where="workload",
            hint=f"prompt + output, or the context asked for, can be {most} tokens at most",
            field="context_tokens",
            value=wanted,
        )
    if work.context_tokens is not None and work.context_tokens < work.prompt_tokens + work.output_tokens:
        raise UsageError(
            f"a context of {work.context_tokens} tokens cannot hold {work.prompt_tokens} + {work.output_tokens}",
            where="workload",
            hint="raise the context, or lower prompt or output",
            field="context_tokens",
            value=work.context_tokens,
        )
