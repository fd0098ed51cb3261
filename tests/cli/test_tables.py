"""The tables of a measured run are whole on a terminal of 80 columns."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from shardwise.cli import probe
from shardwise.cli.common import Output, set_output
from shardwise.cli.main import run
from shardwise.cli.tables import boundary_table, stage_table

TIMES = {"p50": 0.00588, "p95": 0.01174}
STAGE = {
    "node": "living-room",
    "layers": [10, 21],
    "weight_bytes": 523_190_840,
    "kv_bytes": 157_286_400,
    "peak_memory_bytes": 778_000_000,
    "compute_s": {"decode_p50": 0.01265},
    "wait_s": TIMES,
}
HOP = {
    "from": 10,
    "to": 11,
    "tensor": {"dtype": "f32", "shape": [1, 16384]},
    "bytes_per_token": 65_601,
    "transfer_s": TIMES,
    "copy_s": {"p50": 57e-6},
}
RESULT: dict[str, Any] = {
    "stages": [STAGE, STAGE],
    "boundaries": [HOP, HOP],
    "predicted": {"stages": [{"compute_s": {"decode_p50": 0.0123}}] * 2, "boundaries": [{"transfer_s": TIMES}] * 2},
}


@pytest.mark.parametrize("model", ["sample", "deepseek-v3", "gpt-oss-120b", "llama-3-70b:q4_k_m"])
def test_a_description_is_whole_at_80_columns(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["describe", model, "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "quantization" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_measured_links_are_whole_at_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def a(value: float) -> SimpleNamespace:
        return SimpleNamespace(value=value)

    link = {"source": "living-room-desktop", "target": "nas[attic]", "kind": "ethernet", "bytes_per_s": a(117.5e6)}
    profile = SimpleNamespace(**link, latency_s=a(0.0001234), jitter_p95_s=a(0.001234))
    trip = SimpleNamespace(p50=0.0012345, p95=0.0123456, p99=0.1234567)
    found = SimpleNamespace(
        nodes=[], failed=[], links=[SimpleNamespace(profile=profile, round_trip_s=trip, loaded_round_trip_s=trip)]
    )
    monkeypatch.setenv("COLUMNS", "80")
    set_output(Output())
    probe._show(found)
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    for words in ("940 Mbit/s", "123 µs", "123 ms", "12.3 ms", "1.23 ms", "ethernet", "nas["):
        assert words in shown, (words, shown)


def test_nothing_is_cut_at_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80)
    for table in (stage_table(RESULT), boundary_table(RESULT)):
        console.print(table)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    assert "1 living-room" in shown
    assert "12.65 ms" in shown or "12.7 ms" in shown
    assert "f32 [1, 16384]" in shown
