"""About equal stages that the architecture allows."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shardwise.errors import UsageError
from shardwise.model.even_split import even_split
from shardwise.model.families import FAMILIES, slice_problem
from shardwise.model.gguf import describe_gguf
from shardwise.shards.gguf_source import GgufSource
from shardwise.shards.slice_recipe import layer_kinds
from tests.shards.slicing.conftest import MakeTiny
from tests.tiny_models import SPECS


@pytest.mark.parametrize(
    ("name", "num_stages", "expected"),
    [
        ("llama", 1, (4,)),
        ("llama", 3, (2, 1, 1)),
        ("gemma3", 2, (4, 4)),
        ("smollm3", 2, (4, 8)),
        ("qwen35", 3, (4, 4, 4)),
        ("gpt-oss", 2, (3, 2)),
        ("gpt-oss", 3, (2, 2, 1)),
        ("lfm2", 2, (3, 3)),
        ("nemotron_h", 2, (3, 3)),
        ("glm4moe", 2, (2, 2)),
    ],
)
def test_even_splits(name: str, num_stages: int, expected: tuple[int, ...], tiny: MakeTiny) -> None:
    assert even_split(describe_gguf(tiny(name)), num_stages) == expected


def test_an_impossible_number_of_stages_names_the_possible_ones(tiny: MakeTiny) -> None:
    with pytest.raises(UsageError, match="cannot be split into 4 stages") as caught:
        even_split(describe_gguf(tiny("qwen35")), 4)
    assert caught.value.details["possible"] == [1, 2, 3]


@pytest.mark.parametrize("name", SPECS)
def test_what_the_description_allows_is_what_slicing_allows(name: str, tiny: MakeTiny) -> None:
    """Layer kinds as described, and as read from the header for slicing, lead to the same splits."""
    path = tiny(name)
    model, source = describe_gguf(path), GgufSource(path)
    assert model.num_layers == SPECS[name].computed_layers
    kinds = layer_kinds(source, FAMILIES[source.architecture], model.num_layers)
    for num_stages in (2, 3):
        try:
            lengths = even_split(model, num_stages)
        except UsageError:
            continue
        borders = [sum(lengths[:i]) for i in range(num_stages + 1)]
        problems = [slice_problem(FAMILIES[source.architecture], a, b, model.num_layers, kinds) for a, b in pairwise(borders)]
        assert problems == [None] * num_stages
