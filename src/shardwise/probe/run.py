"""`probe` as a function: this machine alone, or through its cluster's engine all machines and links.

**Fails with** the errors of the cluster where this machine is in one and it does not answer; `UsageError` for a
quantization or file that cannot be. **Called by** the command line, `sw.probe`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardwise.clock import SystemClock
from shardwise.cluster.machine import default_name, safe_name
from shardwise.cluster.state import StateDir
from shardwise.errors import UsageError
from shardwise.machines import write_cluster
from shardwise.probe.cluster import ClusterProbe
from shardwise.probe.folders import OWN_FOLDER
from shardwise.probe.link_task import LinkSettings
from shardwise.probe.node import NodeSettings, NodeSuite
from shardwise.probe.report import ProbeReport, slowest_link
from shardwise.probe.synthetic import SUPPORTED
from shardwise.records import Record

OnProgress = Callable[[str, float], None]


class ProbeRequest(Record):
    """What to measure."""

    quick: bool = False
    local: bool = False
    threads: int = 1
    model: str = ""
    quantizations: tuple[str, ...] = ()
    memory_bytes: int = 0
    name: str = ""
    fresh: bool = False


def probe(request: ProbeRequest, say: OnProgress | None = None, state: StateDir | None = None) -> ProbeReport:
    """Measure, and tell how far along it is."""
    unknown = [q for q in request.quantizations if q not in SUPPORTED]
    if unknown:
        raise UsageError(f"no probe for {', '.join(unknown)}", where="--quantization", hint=f"one of {', '.join(SUPPORTED)}")
    folder = state or StateDir()
    tell = say or (lambda what, share: None)
    if request.local or not folder.cluster.exists():
        return ProbeReport(nodes=(NodeSuite(_settings(request), SystemClock(), tell).run(),))
    return _whole_cluster(request, tell, folder)


def write(report: ProbeReport, path: Path) -> None:
    """As a cluster file; links that could not be measured get the slowest one's figures as default."""
    default = slowest_link(report.links) if report.missing_links() else None
    if report.missing_links() and default is None:
        missing = ", ".join(f"{a} -> {b}" for a, b in report.missing_links())
        raise UsageError(f"no link was measured: {missing}", where=str(path), hint="see what failed above, or write them by hand")
    write_cluster(report.cluster(default_link=default), path)


def _whole_cluster(request: ProbeRequest, say: OnProgress, folder: StateDir) -> ProbeReport:
    from shardwise.cluster import lifecycle

    engine = lifecycle.attach(folder)
    try:
        own = lifecycle.own_node(folder, engine.node_infos())
        links = LinkSettings.quick() if request.quick else LinkSettings()
        return ClusterProbe(engine, own.address, _settings(request), links, say=say).run()
    finally:
        engine.close()


def _settings(request: ProbeRequest) -> NodeSettings:
    return NodeSettings(
        name=safe_name(request.name or default_name()),
        quick=request.quick,
        threads=request.threads,
        quantizations=request.quantizations,
        model=request.model,
        memory_bytes=request.memory_bytes,
        disk_folder=OWN_FOLDER,
        cache_folder=OWN_FOLDER,
        fresh=request.fresh,
    )
