"""A chain of slices gives the unsharded model's logits to the bit: every proved architecture, every allowed cut.

Tolerance: none. Both sides run the same kernels on the same numbers in the same order.
"""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import msgspec
import pytest

from shardwise.model.families import FAMILIES, slice_problem
from shardwise.shards.gguf_source import GgufSource
from shardwise.shards.slice_recipe import layer_kinds
from tests.shards.slicing.conftest import MakeTiny
from tests.shards.slicing.harness import chain_logits, cut, largest_difference, reference_logits
from tests.tiny_models import QUANTIZATIONS, SPECS


def _check(path: Path, cuts: list[list[int]], num_layers: int, folder: Path) -> None:
    expected = reference_logits(path)
    assert expected[0].std() > 0.1, "a model without differences between tokens proves nothing"
    differences = {tuple(c): largest_difference(expected, chain_logits(cut(path, c, num_layers, folder))) for c in cuts}
    assert differences == dict.fromkeys(differences, 0.0)


def allowed_splits(path: Path, num_layers: int, num_stages: int) -> list[list[int]]:
    """All cuts into `num_stages` slices that the architecture allows."""
    source = GgufSource(path)
    family = FAMILIES[source.architecture]
    kinds = layer_kinds(source, family, num_layers)

    def allowed(cuts: tuple[int, ...]) -> bool:
        borders = pairwise([0, *cuts, num_layers])
        return all(slice_problem(family, a, b, num_layers, kinds) is None for a, b in borders)

    return [list(cuts) for cuts in combinations(range(1, num_layers), num_stages - 1) if allowed(cuts)]


@pytest.mark.parametrize("name", SPECS)
def test_every_cut_of_every_architecture_is_exact(name: str, tiny: MakeTiny, tmp_path: Path) -> None:
    """Uncut, each allowed 2-way cut (of long models a few), and the most uneven 3-way cut."""
    path, num_layers = tiny(name), SPECS[name].computed_layers
    two_way = allowed_splits(path, num_layers, 2)
    assert two_way
    if len(two_way) > 12:
        two_way = [*two_way[:3], *two_way[len(two_way) // 2 :][:2], *two_way[-3:]]
    three_way = allowed_splits(path, num_layers, 3)[:1]
    _check(path, [[], *two_way, *three_way], num_layers, tmp_path)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_every_quantization_is_exact(quantization: str, tiny: MakeTiny, tmp_path: Path) -> None:
    _check(tiny("llama", quantization), [[1], [3], [1, 2]], 4, tmp_path)


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("name", ["llama/moe", "llama/tied"])
def test_quantized_experts_and_tied_heads_are_exact(name: str, quantization: str, tiny: MakeTiny, tmp_path: Path) -> None:
    _check(tiny(name, quantization), [[2], [1, 3]], 4, tmp_path)


def test_every_proved_architecture_has_a_model_here() -> None:
    assert set(FAMILIES) == {spec.architecture for spec in SPECS.values()}


@pytest.mark.parametrize(
    ("name", "fact", "neutral", "cut_at"),
    [
        ("bloom", "input_node", None, 2),
        ("gemma", "input_node", None, 2),
        ("gemma2", "input_node", None, 2),
        ("gemma2", "sliding_window", None, 1),
        ("gemma3", "sliding_window", None, 3),
        ("gemma3", "scales_input", False, 2),
        ("gpt2", "input_node", None, 2),
        ("granite", "neutral_metadata", {}, 1),
        ("cohere2", "sliding_window", None, 1),
        ("gpt-oss", "sliding_window", None, 3),
        ("olmo2/windows", "sliding_window", None, 2),
        ("smollm3", "cut_multiple", 1, 2),
    ],
)
def test_without_the_fact_the_logits_differ(
    name: str, fact: str, neutral: object, cut_at: int, tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: each fact taken away shows as a difference of at least 1% of the logits' spread."""
    spec = SPECS[name]
    family = msgspec.structs.replace(FAMILIES[spec.architecture], **{fact: neutral})
    monkeypatch.setitem(FAMILIES, spec.architecture, family)
    expected = reference_logits(tiny(name))
    actual = chain_logits(cut(tiny(name), [cut_at], spec.num_layers, tmp_path))
    assert largest_difference(expected, actual) > 0.01 * expected[0].std()
