"""Facts per architecture: what may be cut where, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from shardwise.errors import UnsupportedModelError, UsageError
from shardwise.model.families import (
    ATTENTION,
    FAMILIES,
    OTHER,
    RECURRENT,
    WINDOWED,
    cut_points,
    require_proved,
    slice_problem,
)
from shardwise.shards.slicing import slice_model
from tests.shards.slicing.conftest import MakeTiny
from tests.tiny_models import SPECS, make_tiny


def test_an_unproved_architecture_is_refused_with_the_list_of_proved_ones() -> None:
    with pytest.raises(UnsupportedModelError, match="'rwkv7'") as caught:
        require_proved("rwkv7")
    assert caught.value.details["proved"] == sorted(FAMILIES)
    assert "qwen3moe" in caught.value.hint


@pytest.mark.parametrize(
    ("architecture", "num_layers", "expected"),
    [
        ("llama", 4, [1, 2, 3]),
        ("llama", 1, []),
        ("smollm3", 12, [4, 8]),
        ("qwen35", 12, [4, 8]),
        ("gemma2", 26, list(range(1, 26))),
        ("gemma2", 46, []),  # 27B: llama.cpp takes another attention scale for 46 layers, and a slice has fewer
        ("gemma3", 62, []),
        ("gemma4", 6, [2, 3, 4]),
        ("command-r", 64, []),
        ("exaone4", 64, []),
    ],
)
def test_cut_points(architecture: str, num_layers: int, expected: list[int]) -> None:
    assert cut_points(FAMILIES[architecture], num_layers) == expected


def test_lengths_that_llama_cpp_takes_for_another_model_are_refused() -> None:
    family = FAMILIES["deepseek2"]
    assert slice_problem(family, 0, 27, 27) is None
    assert slice_problem(family, 0, 30, 61) is None
    assert slice_problem(family, 0, 27, 61) is not None
    assert slice_problem(family, 30, 56, 61) is not None


def test_a_hybrid_slice_needs_attention_and_a_state() -> None:
    kinds = [RECURRENT, OTHER, ATTENTION, RECURRENT, OTHER, ATTENTION]
    family = FAMILIES["nemotron_h"]
    assert slice_problem(family, 0, 3, 6, kinds) is None
    assert slice_problem(family, 3, 6, 6, kinds) is None
    assert "no attention layer" in str(slice_problem(family, 0, 2, 6, kinds))
    assert "no recurrent layer" in str(slice_problem(family, 4, 6, 6, kinds))


def test_a_slice_of_a_model_with_windows_needs_a_window() -> None:
    kinds = [WINDOWED, ATTENTION, WINDOWED, ATTENTION]
    family = FAMILIES["gpt-oss"]
    assert slice_problem(family, 0, 1, 4, kinds) is None
    assert slice_problem(family, 1, 3, 4, kinds) is None
    assert "no sliding window layer" in str(slice_problem(family, 3, 4, 4, kinds))
    assert slice_problem(FAMILIES["llama"], 3, 4, 4, [ATTENTION] * 4) is None


def variant(name: str, path: Path, **keys: object) -> Path:
    """A tiny model with other metadata; None removes a key."""
    spec = SPECS[name]
    with pytest.MonkeyPatch.context() as patch:
        kept = {k: v for k, v in (spec.keys | keys).items() if v is not None}
        patch.setitem(SPECS, name, dataclasses.replace(spec, keys=kept))
        return make_tiny(name, path=path)


@pytest.mark.parametrize(
    ("name", "keys", "named"),
    [
        ("granite", {"deepstack_mapping": [-1, 0, -1, -1]}, "deepstack_mapping"),
        ("qwen2", {"rope.dimension_sections": [16, 16, 0, 0]}, "rope.dimension_sections"),
        ("minicpm", {"residual_scale": None}, "residual_scale"),
        ("ernie4_5-moe", {"interleave_moe_layer_step": 2}, "interleave_moe_layer_step"),
        ("gemma4", {"attention.shared_kv_layers": 2}, "attention.shared_kv_layers"),
        ("llama4", {"attention.sliding_window": 0}, "attention.sliding_window"),
        ("qwen3next", {"full_attention_interval": 2}, "full_attention_interval"),
        (
            "qwen3next",
            {"attention.recurrent_layers": [True, False] * 4},
            "attention.recurrent_layers",
        ),
    ],
)
def test_unproved_variants_are_refused_by_their_key(name: str, keys: dict[str, object], named: str, tmp_path: Path) -> None:
    path = variant(name, tmp_path / "model.gguf", **keys)
    with pytest.raises(UnsupportedModelError, match=named):
        slice_model(path, 0, 4, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_forbidden_cut_says_what_is_allowed(tiny: MakeTiny, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be cut before layer 3") as caught:
        slice_model(tiny("smollm3"), 0, 3, tmp_path)
    assert caught.value.hint == "it may be cut before layer 4, 8"


def test_layers_for_multi_token_prediction_stay_out_of_slices(tiny: MakeTiny, tmp_path: Path) -> None:
    files = slice_model(tiny("glm4moe"), 2, 4, tmp_path)
    assert files.num_layers == 4
    with pytest.raises(UsageError, match="model of 4 layers"):
        slice_model(tiny("glm4moe"), 2, 5, tmp_path)


def test_the_documentation_names_every_proved_architecture() -> None:
    lines = (Path(__file__).parents[3] / "docs" / "architectures.md").read_text(encoding="utf-8").splitlines()
    assert [line.split("`")[1] for line in lines if line.startswith("| `")] == list(FAMILIES)
