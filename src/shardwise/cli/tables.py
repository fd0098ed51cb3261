"""Tables of a measured run for people."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from shardwise.units import format_bytes, format_duration


def summary_line(result: dict[str, Any]) -> str:
    """One line with what people compare."""
    inter = result["inter_token_s"]
    return (
        f"{result['decode_tokens_per_s']:.1f} tokens/s, first token after {format_duration(result['time_to_first_token_s'])} "
        f"({result['prompt_tokens']} prompt tokens), between tokens p50 {format_duration(inter['p50'])} "
        f"p95 {format_duration(inter['p95'])}, {len(result['stages'])} stage(s)"
    )


def _table(title: str, columns: tuple[str, ...]) -> Table:
    """Narrow enough for a terminal of 80 columns."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < 2 else "right", no_wrap=True)
    return table


def stage_table(result: dict[str, Any]) -> Table:
    """What each stage holds and how long it computes a token; predicted beside measured."""
    predicted = (result.get("predicted") or {}).get("stages") or []
    columns = ("stage", "layers", "weights", "KV", "peak\nmemory", "compute\np50", "idle\np50")
    table = _table("Stages", (*columns, "pre-\ndicted") if predicted else columns)
    for index, stage in enumerate(result["stages"]):
        row = [
            f"{index} {stage['node']}",
            f"{stage['layers'][0]}-{stage['layers'][1] - 1}",
            format_bytes(stage["weight_bytes"]),
            format_bytes(stage["kv_bytes"]),
            format_bytes(stage["peak_memory_bytes"]),
            format_duration(stage["compute_s"]["decode_p50"]),
            format_duration(stage["wait_s"]["p50"]),
        ]
        if index < len(predicted):
            row.append(format_duration(predicted[index]["compute_s"]["decode_p50"]))
        table.add_row(*row)
    return table


def boundary_table(result: dict[str, Any]) -> Table:
    """What crosses each boundary for one token, and how long it takes."""
    predicted = (result.get("predicted") or {}).get("boundaries") or []
    columns = ("hop", "tensor", "bytes/\ntoken", "transfer\np50", "\np95", "copy\np50")
    table = _table("Boundaries", (*columns, "pre-\ndicted") if predicted else columns)
    for index, hop in enumerate(result["boundaries"]):
        row = [
            f"{hop['from']} -> {hop['to']}",
            f"{hop['tensor']['dtype']} {hop['tensor']['shape']}",
            f"{hop['bytes_per_token']:.0f}",
            format_duration(hop["transfer_s"]["p50"]),
            format_duration(hop["transfer_s"]["p95"]),
            format_duration(hop["copy_s"]["p50"]),
        ]
        if index < len(predicted):
            row.append(format_duration(predicted[index]["transfer_s"]["p50"]))
        table.add_row(*row)
    return table


def predicted_line(result: dict[str, Any]) -> str:
    """Predicted beside measured, one line; empty without a prediction."""
    predicted = result.get("predicted")
    if not predicted:
        return ""
    return (
        f"predicted {predicted['decode_tokens_per_s']:.1f} tokens/s (measured {result['decode_tokens_per_s']:.1f}), "
        f"first token {format_duration(predicted['time_to_first_token_s'])} "
        f"(measured {format_duration(result['time_to_first_token_s'])})"
    )
