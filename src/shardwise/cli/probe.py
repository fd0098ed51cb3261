"""`shardwise probe`: measure this machine, or all machines of its cluster and every link between them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.cli.common import output


def probe(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the cluster file here.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Under ten seconds a machine, rougher.")] = False,
    local: Annotated[bool, typer.Option("--local", help="Only this machine, also in a cluster.")] = False,
    threads: Annotated[int, typer.Option("--threads", min=0, help="Threads of a stage, as for run; 0 = all cores but one.")] = 1,
    model: Annotated[str, typer.Option("--model", help="Also time real layers of this model.")] = "",
    quantization: Annotated[list[str] | None, typer.Option("--quantization", help="Only these, e.g. Q4_K; repeat it.")] = None,
    memory: Annotated[str, typer.Option("--memory", help="What a model may use here (default: as measured).")] = "",
    name: Annotated[str, typer.Option("--name", help="What to call this machine (default: its host name).")] = "",
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what the cache knows.")] = False,
) -> None:
    """Measure this machine, or all machines of its cluster and every link between them."""
    from shardwise.probe import run
    from shardwise.units import parse_bytes

    request = run.ProbeRequest(
        quick=quick,
        local=local,
        threads=threads,
        model=model,
        quantizations=tuple(q.upper() for q in quantization or ()),
        memory_bytes=parse_bytes(memory, field="--memory") if memory else 0,
        name=name,
        fresh=fresh,
    )
    with output().progress() as update:
        report = run.probe(request, update)
    if out is not None:
        run.write(report, out)
        output().note(f"wrote {out}")
    if output().json:
        output().document(_as_data(report))
    else:
        _show(report)


def _as_data(report: Any) -> dict[str, Any]:
    from shardwise.records import plain

    return {
        "cluster": plain(report.cluster()),
        "nodes": [{"name": n.profile.name, "threads": n.threads, "took_s": n.took_s, "notes": n.notes} for n in report.nodes],
        "links": [plain(link) for link in report.links],
        "failed": list(report.failed),
    }


def _show(report: Any) -> None:
    from rich import box
    from rich.table import Table

    from shardwise.units import format_bytes, format_compute, format_duration, format_rate

    for node in report.nodes:
        profile = node.profile
        disk = f", disk {format_rate(profile.disk_bytes_per_s.value)}" if profile.disk_bytes_per_s else ""
        output().plain(
            f"{profile.name}: {format_bytes(profile.memory_bytes)} for a model, memory "
            f"{format_rate(profile.memory_bytes_per_s.value)}, {format_compute(profile.compute_flops_per_s.value)}{disk}, "
            f"{profile.num_cores} cores (backend on {node.threads}), {format_duration(node.took_s)}"
        )
        for device, rates in [("cpu", profile.rates), *((d.name, d.rates) for d in profile.devices)]:
            for rate in rates:
                output().plain(
                    f"  {device} {rate.quantization:8} decode reads {format_rate(rate.weight_bytes_per_s.value)}, "
                    f"prefill {format_compute(rate.compute_flops_per_s.value)}  ({rate.library})"
                )
        for note in node.notes:
            output().plain(f"  note: {note}")
    if report.links:
        table = Table(title="Links", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        trip_heading = "round trip\np50/p95/p99"  # three figures: the first to go on in the next line, after the names
        for heading in ("from", "to", "kind", "rate", "latency", "jitter\np95", trip_heading, "under load\np95"):
            table.add_column(heading, no_wrap=heading not in ("from", "to", trip_heading), overflow="fold")
        for link in report.links:
            profile, trip = link.profile, link.round_trip_s
            loaded = format_duration(link.loaded_round_trip_s.p95) if link.loaded_round_trip_s else "-"
            trips = " / ".join(format_duration(v) for v in (trip.p50, trip.p95, trip.p99))
            jitter = format_duration(profile.jitter_p95_s.value) if profile.jitter_p95_s else "-"
            rate = format_rate(profile.bytes_per_s.value, bits=True)
            latency = format_duration(profile.latency_s.value)
            table.add_row(profile.source, profile.target, profile.kind, rate, latency, jitter, trips, loaded)
        output().plain(table)
    for failure in report.failed:
        output().note(f"not measured: {failure}")
