"""Measure the machines that a cluster file does not know yet, quickly, while the others serve.

A profile and the nodes that are up flow in; the profile with the newcomers and their links comes out. **Promises** nothing that
is known is measured again: a machine that serves would look slow. **Fails with** the errors of the cluster probe, and
`StageLoadFailed` where a newcomer could not be measured. **Called by** the command line, for a deployment's follower.
"""

from __future__ import annotations

from shardwise.cluster.engine import ClusterEngine, NodeInfo
from shardwise.errors import StageLoadFailed
from shardwise.machines.profile import ClusterProfile
from shardwise.probe.cluster import ClusterProbe
from shardwise.probe.folders import OWN_FOLDER
from shardwise.probe.link_task import LinkSettings
from shardwise.probe.node import NodeSettings
from shardwise.probe.report import slowest_link
from shardwise.probe.synthetic import SUPPORTED
from shardwise.records import replace


def measure_newcomers(
    engine: ClusterEngine, own_host: str, infos: list[NodeInfo], known: ClusterProfile, *, threads: int, quantization: str
) -> ClusterProfile:
    """`known` with the nodes of `infos` that it lacks, and the links between them and the others."""
    settings = NodeSettings(
        name="",
        quick=True,
        threads=threads,
        quantizations=(quantization,) if quantization in SUPPORTED else (),
        disk_folder=OWN_FOLDER,
        cache_folder=OWN_FOLDER,
    )
    probe = ClusterProbe(engine, own_host, settings, LinkSettings.quick(), nodes=infos, known=known)
    report = probe.run()
    names = {node.name for node in known.nodes} | {node.profile.name for node in report.nodes}
    missing = sorted({info.name for info in infos} - names)
    if missing:
        raise StageLoadFailed(f"not measured: {'; '.join(report.failed) or ', '.join(missing)}", where="probe")
    default = known.default_link or slowest_link(report.links)  # for a link that could not be measured
    return replace(
        known,
        nodes=(*known.nodes, *(node.profile for node in report.nodes)),
        links=(*known.links, *(link.profile for link in report.links)),
        default_link=default,
    )
