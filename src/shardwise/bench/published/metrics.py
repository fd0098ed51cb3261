"""What a row measures: its metric's name and its unit -> a `Question`. Names that mean nothing give None.

A prediction is made in seconds, tokens/s or bytes; `Question.in_unit` turns it into the row's own unit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.bench.published.rows import Row
from shardwise.bench.published.values import number

_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0, "min": 60.0}
_SIZES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
DEFAULT_PROMPT_TOKENS = 16  # a question such as "how are you": what papers time without saying so
DEFAULT_ANSWER_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Question:
    """One metric. `quantity`: decode | prefill | first_token | layer_decode | layer_prefill | forward | sync_bytes |
    memory | serve_rate | serve_decode | serve_prompt."""

    quantity: str
    prompt_tokens: float
    context_tokens: float  # positions that a decode step reads
    batch: int
    quantile: str = ""  # p50 | p95 | avg
    per: float = 1.0  # the row's unit in SI units
    inverse: bool = False  # a rate

    def in_unit(self, seconds: float, tokens: float = 1.0) -> float:
        """`tokens` (or steps) took `seconds`; for bytes `seconds` is the bytes."""
        return tokens / seconds / self.per if self.inverse else seconds / self.per / (tokens or 1.0)


def question(row: Row) -> Question | None:
    """What `row` asks, or None."""
    unit = _unit(row.unit)
    found = _quantity(row.metric, row.unit.lower())
    if unit is None or found is None:
        return None
    per, inverse = unit
    batch = _trailing(r"batch_?(\d+)", row.metric) or row.batch
    prompt, context = _tokens(row, found)
    quantile = next((q for q in ("p50", "p95", "p99", "avg", "mean") if row.metric.endswith(q)), "")
    return Question(found, prompt, context, int(batch), quantile, per, inverse)


def _unit(unit: str) -> tuple[float, bool] | None:
    """(size in SI, whether it is a rate)."""
    clean = unit.lower().strip().replace(" ", "")
    if re.fullmatch(r"(tokens?|toks?|t|steps?)(/|per)s(ec(ond)?)?|tps|it/s", clean):
        return 1.0, True
    head = re.split(r"/|per", clean)[0]
    if head in _TIMES:
        return _TIMES[head], False
    return (_SIZES[head], False) if head in _SIZES else None


_QUANTITIES = (
    (r"prompt_layer|prefill_layer", "layer_prefill"),
    (r"decode_layer|layer_time|layer_decode", "layer_decode"),
    (r"sync.*bytes|bytes_per_token|comm.*bytes", "sync_bytes"),
    (r"mem(ory)?(_|$)|peak_mem|vram|ram", "memory"),
    (r"parallel_forward|forward", "forward"),
    (r"decode_throughput|serving_throughput", "serve_rate"),
    (r"decode_latency", "serve_decode"),
    (r"prompt_latency", "serve_prompt"),
    (r"ttft|first_token|prompt_eval_time", "first_token"),
    (r"^pp\d*|prefill|prompt_eval|prompt_proc", "prefill"),
    (r"^tg\d*|tpot|token_latency|tokens?_per|^tok|decode|generation|eval|steps_per_s|inter_token|^itl", "decode"),
)


def _quantity(metric: str, unit: str) -> str | None:
    for pattern, quantity in _QUANTITIES:
        if re.search(pattern, metric):
            return quantity
    return "decode" if re.search(r"tok|/s", unit) and "throughput" in metric else None


def _trailing(pattern: str, text: str) -> float | None:
    match = re.search(pattern, text)
    return float(match[1]) if match else None


def _tokens(row: Row, quantity: str) -> tuple[float, float]:
    """(prompt tokens, positions read by a decode step)."""
    stated = _trailing(r"(?:^pp|^tg|prompt|tokens?|seq|ctx)_?(\d+)", row.metric)
    already = number(row.context) or 0.0
    is_benchmark = row.metric.startswith(("tg", "pp"))
    depth = already if "depth" in row.context or not is_benchmark else 0.0
    if is_benchmark and not re.match(r"(tg|pp)\d", row.metric):
        depth = already  # a context is stated, no length of the test
    if "generated" in row.context:
        depth = already / 2
    if quantity in ("prefill", "first_token", "layer_prefill", "forward"):
        fallback = already or (512.0 if quantity == "prefill" else float(DEFAULT_PROMPT_TOKENS))
        return stated or fallback, depth if "depth" in row.context else 0.0
    if row.metric.startswith("tg") and stated:
        return 0.0, depth + stated / 2
    return 0.0, (stated or depth or 0.0) + (0.0 if depth else DEFAULT_ANSWER_TOKENS / 2)
