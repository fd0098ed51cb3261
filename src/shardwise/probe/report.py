"""The result of a probe: profiles of nodes and links, as records and as a cluster file. Pure."""

from __future__ import annotations

from shardwise.machines.profile import ClusterProfile, LinkProfile
from shardwise.probe.link_task import LinkReport
from shardwise.probe.node import NodeReport
from shardwise.records import Record


class ProbeReport(Record):
    """Everything that was measured."""

    nodes: tuple[NodeReport, ...]
    links: tuple[LinkReport, ...] = ()
    failed: tuple[str, ...] = ()  # nodes and links that could not be measured, and why

    def cluster(self, *, default_link: LinkProfile | None = None) -> ClusterProfile:
        """What the planner reads. Links that failed are left out; a default stands in for them where given."""
        links = tuple(report.profile for report in self.links)
        return ClusterProfile(nodes=tuple(report.profile for report in self.nodes), links=links, default_link=default_link)

    def missing_links(self) -> list[tuple[str, str]]:
        """Directed pairs without a figure."""
        names = [report.profile.name for report in self.nodes]
        known = {(r.profile.source, r.profile.target) for r in self.links}
        return [(a, b) for a in names for b in names if a != b and (a, b) not in known]


def slowest_link(links: tuple[LinkReport, ...]) -> LinkProfile | None:
    """The careful stand-in for links that could not be measured."""
    return min((r.profile for r in links), key=lambda p: p.bytes_per_s.value, default=None)
