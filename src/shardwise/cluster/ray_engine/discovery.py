"""From Ray's list of nodes to ours: one entry an identity, dead and duplicate entries left out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardwise.cluster.engine import NodeInfo
from shardwise.cluster.ray_engine.settings import LABEL_IDENTITY, LABEL_INCARNATION, LABEL_NODE
from shardwise.records import Record


class RayNode(Record):
    """A living raylet under our name for it."""

    node_id: str
    info: NodeInfo
    incarnation: int = 0


def living_nodes(listed: Iterable[Mapping[str, Any]]) -> dict[str, RayNode]:
    """Name -> node. Of two raylets with one identity the later incarnation counts: the other is a ghost.

    A raylet that shardwise did not start has no labels: its identity is Ray's node id, its name the one Ray shows,
    with a number where several machines have the same.
    """
    newest: dict[str, RayNode] = {}
    for entry in listed:
        if not entry["Alive"]:
            continue
        node = _ray_node(entry)
        old = newest.get(node.info.identity)
        if old is None or (node.incarnation, node.node_id) > (old.incarnation, old.node_id):
            newest[node.info.identity] = node
    named: dict[str, RayNode] = {}
    for node in sorted(newest.values(), key=lambda n: (n.info.name, n.info.identity)):
        name, number = node.info.name, 2
        while name in named:
            name, number = f"{node.info.name}-{number}", number + 1
        info = NodeInfo(name=name, address=node.info.address, identity=node.info.identity, memory_bytes=node.info.memory_bytes)
        named[name] = RayNode(node_id=node.node_id, info=info, incarnation=node.incarnation)
    return named


def _ray_node(entry: Mapping[str, Any]) -> RayNode:
    labels: Mapping[str, str] = entry.get("Labels") or {}
    incarnation = labels.get(LABEL_INCARNATION, "0")
    address = str(entry["NodeManagerAddress"])
    shown = str(entry.get("NodeName") or address)
    unlabelled = str(entry.get("NodeManagerHostname") or shown) if shown == address else shown
    return RayNode(
        node_id=str(entry["NodeID"]),
        incarnation=int(incarnation) if incarnation.isdecimal() else 0,
        info=NodeInfo(
            name=labels.get(LABEL_NODE) or unlabelled,
            address=address,
            identity=labels.get(LABEL_IDENTITY) or str(entry["NodeID"]),
            memory_bytes=int((entry.get("Resources") or {}).get("memory", 0)),
        ),
    )
