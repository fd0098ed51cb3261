"""Which places can take over what a lost stage did: nodes with memory for it, and a new split over the places that are left.

Memory is what the engine says may still be reserved; 0 means unknown, and is taken as enough. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.cluster.engine import NodeInfo
from shardwise.deploy.memory import stage_bytes
from shardwise.deploy.options import Placement
from shardwise.deploy.workers import Layout
from shardwise.errors import ShardwiseError
from shardwise.model.even_split import even_split


def surviving_stages(layout: Layout, lost: int, nodes: Sequence[str]) -> list[int]:
    """The other stages, as far as their nodes are up."""
    return [i for i, place in enumerate(layout.places) if i != lost and (not place.node or place.node in nodes)]


def nodes_with_room(layout: Layout, stage: int, nodes: Sequence[str], free_bytes: Mapping[str, int]) -> list[str]:
    """Other nodes that can hold the stage: those with most room first, then those with fewest stages."""
    needed = _bytes(layout, layout.manifest.layers[stage])
    fits = [n for n in nodes if n != layout.places[stage].node and (not free_bytes.get(n) or free_bytes[n] >= needed)]
    return sorted(fits, key=lambda n: (-free_bytes.get(n, 0), num_stages_on(layout, n)))


def room_bytes(layout: Layout, infos: Sequence[NodeInfo]) -> dict[str, int]:
    """What is left on each node beside this deployment's stages: workers reserve nothing. 0 = unknown, 1 = nothing."""
    used: dict[str, int] = {}
    for place, layers in zip(layout.places, layout.manifest.layers, strict=True):
        used[place.node] = used.get(place.node, 0) + _bytes(layout, layers)
    return {i.name: max(1, i.memory_bytes - used.get(i.name, 0)) if i.memory_bytes else 0 for i in infos}


def spread_over(layout: Layout, nodes: Sequence[str], room: Mapping[str, int]) -> tuple[tuple[int, ...], list[str]]:
    """An even split over as few of the nodes as have room for it beside what runs, roomiest first; empty where none has."""
    roomiest = sorted(nodes, key=lambda n: -room.get(n, 0))
    for count in range(1, len(roomiest) + 1):
        chosen, start, fits = roomiest[:count], 0, True
        try:
            layers = even_split(layout.model, count)
        except ShardwiseError:  # the architecture cannot be cut into so many
            continue
        for node, number in zip(chosen, layers, strict=True):
            fits = fits and (not room.get(node) or _bytes(layout, (start, start + number)) <= room[node])
            start += number
        if fits:
            return layers, chosen
    return (), []


def num_stages_on(layout: Layout, node: str) -> int:
    """How many stages run there."""
    return sum(place.node == node for place in layout.places)


def split_over(
    layout: Layout, survivors: Sequence[int], free_bytes: Mapping[str, int]
) -> tuple[tuple[int, ...], list[Placement]]:
    """Layers and places of a new split over the survivors, whose present stages end; empty where it does not fit."""
    if not survivors:
        return (), []
    try:
        counts = even_split(layout.model, len(survivors))
    except ShardwiseError:  # the architecture cannot be cut into so many
        return (), []
    places, start = [layout.places[stage] for stage in survivors], 0
    for count, stage, place in zip(counts, survivors, places, strict=True):
        room = free_bytes.get(place.node, 0)
        if room and _bytes(layout, (start, start + count)) > room + _bytes(layout, layout.manifest.layers[stage]):
            return (), []
        start += count
    return counts, places


def _bytes(layout: Layout, layers: tuple[int, int]) -> int:
    return stage_bytes(layout.model, layers[0], layers[1], layout.options)
