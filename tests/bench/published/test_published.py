"""Published rows: words and units, calibration without the row itself, every odd row answered, never an exception."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.bench.published import load_rows, predict_file
from shardwise.bench.published.frameworks import framework_of
from shardwise.bench.published.metrics import question
from shardwise.bench.published.report import predict_rows
from shardwise.bench.published.rows import read_row
from shardwise.bench.published.values import number, scaled
from shardwise.errors import UsageError
from shardwise.machines.devices import find_device

CARD = {"device": "RTX 3090 24GB", "count": 1, "mem_gb": 24, "mem_bw_gbs": 936, "flops": 142e12}
SINGLE = {
    "id": 1,
    "source": "s1",
    "model": "Llama 3 8B",
    "quant": "Q4_K_M",
    "nodes": [CARD],
    "links": None,
    "strategy": "single device",
    "metric": "tg128",
    "value": 110.0,
    "unit": "tokens/s",
}
PAIR = SINGLE | {
    "id": 2,
    "nodes": [CARD | {"count": 2}],
    "links": {"type": "PCIe inside one host"},
    "strategy": "llama.cpp layer split",
    "value": 105.0,
}


def row(**changes: Any) -> Any:
    return read_row(SINGLE | changes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("<5", 2.5), ("0.1-0.4", 0.2), ({"a": 10, "b": 0.1}, 0.1), (True, None), ("many", None), (-1, None), ("1,5", 1.5)],
)
def test_numbers_as_people_write_them(text: Any, expected: float | None) -> None:
    assert number(text) == (pytest.approx(expected) if expected is not None else None)


def test_text_with_its_own_prefix_keeps_it() -> None:
    assert scaled("100 Mbit/s", 1e9) == pytest.approx(1e8)
    assert scaled(10, 1e9) == pytest.approx(1e10)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("RTX3090-24GB", "3090"),
        ("NVIDIA GeForce RTX 4070Ti", "4070 ti"),
        ("Mac Studio M3 Ultra 512GB", "m3 ultra"),
        ("Raspberry Pi 5 8GB", "pi cm5"),
        ("Desktop i9 (16 cores) + RTX 2080 Ti", "2080 ti"),
        ("A100-SXM4-80GB", "a100"),
    ],
)
def test_devices_by_the_names_people_use(name: str, found: str) -> None:
    spec = find_device(name)
    assert spec is not None
    assert spec.name == found


def test_an_unknown_device_is_none() -> None:
    assert find_device("abacus") is None


@pytest.mark.parametrize(
    ("metric", "unit", "quantity", "inverse"),
    [
        ("tg128", "tokens/s", "decode", True),
        ("token_latency", "ms/token", "decode", False),
        ("pp512", "t/s", "prefill", True),
        ("ttft_prompt2048", "ms", "first_token", False),
        ("peak_mem_per_node", "GB", "memory", False),
        ("decode_latency_p50", "s", "serve_decode", False),
    ],
)
def test_metrics(metric: str, unit: str, quantity: str, inverse: bool) -> None:
    ask = question(row(metric=metric, unit=unit))
    assert ask is not None
    assert (ask.quantity, ask.inverse) == (quantity, inverse)


def test_programs_by_strategy_before_source() -> None:
    assert framework_of(row(strategy="tensor parallel x2 (dllama v0.1.0)")).name == "dllama"
    assert framework_of(row(strategy="llama.cpp RPC layer split x2")).name == "llama.cpp-rpc"
    assert framework_of(row(strategy="tensor parallel 8", source="github:Mutinifni/splitwise-sim")).name == "splitwise"


def test_a_single_row_calibrates_its_device_and_not_itself() -> None:
    report = predict_rows([read_row(SINGLE), read_row(PAIR)])
    alone, pair = report.rows
    assert pair.error is not None
    assert abs(pair.error) < 0.05
    assert alone.predicted != alone.measured
    slower = predict_rows([read_row(SINGLE | {"value": 55.0}), read_row(PAIR)])
    assert slower.rows[0].predicted == alone.predicted
    assert (slower.rows[1].predicted or 0) < 0.6 * (pair.predicted or 0)


def test_a_model_beyond_the_memory_falls_off_the_cliff() -> None:
    small = {"device": "Desktop i9 + RTX 2080 Ti", "mem_gb": 9.7, "vram_gb": 11, "disk_gbs": 3.0}
    rows = [row(model=name, nodes=[small], metric="token_latency", unit="ms/token") for name in ("Llama 3 8B", "Llama 3 70B")]
    fits, pages = predict_rows(rows).rows
    assert (pages.predicted or 0) > 100 * (fits.predicted or 1)


def test_every_row_gets_a_figure_or_a_reason() -> None:
    odd = [{}, 7, None, {"id": 3}, SINGLE | {"model": "no such model"}, SINGLE | {"value": None}, SINGLE | {"unit": "parsec"}]
    report = predict_rows([read_row(entry, i) for i, entry in enumerate(odd)])
    assert len(report.rows) == len(odd)
    assert all(r.skipped for r in report.rows)


@settings(max_examples=150, deadline=None)
@given(
    field=st.sampled_from(sorted(PAIR)),
    value=st.none()
    | st.booleans()
    | st.integers(-5, 10**6)
    | st.floats(allow_nan=True)
    | st.text(max_size=12)
    | st.lists(st.none() | st.integers() | st.dictionaries(st.sampled_from(["device", "count", "mem_gb"]), st.text(max_size=5))),
)
def test_no_field_whatever_it_holds_raises(field: str, value: Any) -> None:
    report = predict_rows([read_row(SINGLE), read_row(PAIR | {field: value})])
    assert all((r.predicted is None) == bool(r.skipped) for r in report.rows)


def test_files_that_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for content in ("", "{}", '"text"', "[1"):
        path.write_text(content)
        with pytest.raises(UsageError):
            load_rows(path)
    path.write_text(json.dumps({"rows": [SINGLE]}))
    assert len(predict_file(path).rows) == 1
    with pytest.raises(UsageError):
        load_rows(tmp_path / "missing.json")
