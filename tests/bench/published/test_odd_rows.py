"""Rows with fields missing, beyond sense, or in words of their own: each gets a figure or a reason, others are not harmed."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from shardwise.bench.published import predict_file
from shardwise.bench.published.report import predict_rows
from shardwise.bench.published.rows import read_row
from shardwise.records import to_json
from tests.bench.published.test_published import PAIR, SINGLE

LINKED = PAIR | {"links": {"type": "Gigabit Ethernet", "bandwidth_gbps": 1.0, "latency_ms": 0.2}, "strategy": "llama.cpp RPC"}
SERVED = PAIR | {
    "metric": "decode_latency_p95",
    "unit": "ms",
    "value": 90.0,
    "strategy": "helix",
    "batch": 16,
    "context": "512 tokens",
}
BASES = (SINGLE, PAIR, LINKED, SERVED, SINGLE | {"metric": "pp512"}, PAIR | {"metric": "ttft", "unit": "s", "value": 1.2})
ODD = (None, "", 0, -1, 1e300, 1e-300, 10**30, "abc", "<5", "0.1-1.0", "800 Mbit/s", True, [], {}, [1, 2], {"a": None})
ODD += (
    float("nan"),
    float("inf"),
    "NaN",
    "∞",
    "4 GB",
    "12,5",
    "Quantum 9000",
    "Llama 9 900B",
    "int4",
    "exl2 4.0bpw",
    "s/token",
    "x" * 999,
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [p for key, inner in items for p in ((*path, key), *_paths(inner, (*path, key)))]


def _odd(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    row = copy.deepcopy(row)
    for _ in range(rng.choice((1, 1, 2, 4))):
        *above, last = rng.choice(_paths(row))
        place = row
        for key in above:
            place = place[key]
        if rng.random() < 0.3:
            del place[last]
        else:
            place[last] = copy.deepcopy(rng.choice(ODD))
    return row


@pytest.mark.parametrize("seed", range(8))
def test_no_row_is_left_without_an_answer(seed: int) -> None:
    rng = random.Random(seed)
    rows = [_odd(rng.choice(BASES), rng) for _ in range(60)]
    report = predict_rows([read_row(row, index) for index, row in enumerate(rows)])
    assert len(report.rows) == len(rows)
    for found in report.rows:
        assert (found.predicted is None) != (found.skipped is None)
        assert found.predicted is None or math.isfinite(found.predicted)
    json.loads(to_json(report))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"nodes": [PAIR["nodes"][0] | {"count": 10**30}]}, "more machines"),
        ({"batch": 1e300}, "more machines, sessions or tokens"),
        ({"metric": "pp99999999999"}, "tokens than anybody has"),
        ({"nodes": [{"device": "Quantum 9000"}]}, "unknown"),
        ({"nodes": [{"device": "Quantum 9000", "mem_bw_gbs": 1e-300}]}, "not stated"),
        ({"nodes": []}, "no machines"),
        ({"nodes": None}, "no machines"),
        ({"model": "Llama 9 900B"}, "model is unknown"),
        ({"model": None}, "model is unknown"),
        ({"quant": "exl3-ish"}, "quantization"),
        ({"quant": None}, "quantization"),
        ({"unit": "furlongs"}, "metric"),
        ({"metric": None}, "metric"),
        ({"value": None}, "no measured value"),
        ({"value": float("nan")}, "no measured value"),
        ({"measured": False}, "not a measurement"),
    ],
)
def test_reasons_are_in_plain_words(changes: dict[str, Any], why: str) -> None:
    found = predict_rows([read_row(PAIR | changes)]).rows[0]
    assert found.predicted is None
    assert why in str(found.skipped)


@pytest.mark.parametrize(
    ("metric", "unit", "per_s"),
    [("tpot", "s/token", 1.0), ("tpot", "ms/token", 1e3), ("token_latency", "us", 1e6), ("itl_p50", "ms", 1e3)],
)
def test_the_same_figure_in_other_units(metric: str, unit: str, per_s: float) -> None:
    usual = predict_rows([read_row(PAIR)]).rows[0].predicted
    found = predict_rows([read_row(PAIR | {"metric": metric, "unit": unit, "value": 9.0})]).rows[0].predicted
    assert usual is not None
    assert found is not None
    context = (SINGLE | PAIR)["metric"]
    assert context.startswith("tg")
    assert found == pytest.approx(per_s / usual, rel=0.02)


def test_a_file_in_an_object_with_a_mark_at_its_start(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"results": [SINGLE, PAIR, None, 7, "x", []]}).encode())
    report = predict_file(path)
    assert [r.predicted is not None for r in report.rows] == [True, True, False, False, False, False]
