"""Process groups of 1 to 4 ranks, each started once and shared by all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.tp.ranks import Ranks


@pytest.fixture(scope="package")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    groups: dict[int, Ranks] = {}

    def get(world: int) -> Ranks:
        if world in groups and groups[world].broken:
            groups.pop(world).close()
        if world not in groups:
            groups[world] = Ranks(world)
        return groups[world]

    yield get
    for group in groups.values():
        group.end_input()
    for group in groups.values():
        group.close()
