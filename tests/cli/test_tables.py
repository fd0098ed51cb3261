"""The tables of a measured run are whole on a terminal of 80 columns."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

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


def test_nothing_is_cut_at_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80)
    for table in (stage_table(RESULT), boundary_table(RESULT)):
        console.print(table)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    assert "1 living-room" in shown
    assert "12.65 ms" in shown or "12.7 ms" in shown
    assert "f32 [1, 16384]" in shown
