"""What can be split how."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.model import describe_model
from shardwise.model.families import FAMILIES, described_kinds, slice_problem
from shardwise.model.splits import SplitOption, split_options
from tests.model.hf_folder import write_llama_folder


def options(reference: object) -> dict[str, SplitOption]:
    return {option.strategy: option for option in split_options(describe_model(reference))}


def test_a_dense_model() -> None:
    found = options("llama-3-70b")
    assert found["layer_wise"].max_parts == 80
    assert found["layer_wise"].even_parts == (2, 4, 5, 8, 10, 16, 20, 40, 80)
    assert (found["tensor_parallel"].max_parts, found["tensor_parallel"].even_parts) == (8, (2, 4, 8))
    assert not found["expert_parallel"].possible


def test_experts_and_latent_attention() -> None:
    found = options("deepseek-r1")
    assert (found["expert_parallel"].max_parts, found["tensor_parallel"].max_parts) == (256, 128)
    assert "58 layers with 256 experts, 8 active" in found["expert_parallel"].note


@pytest.mark.parametrize("reference", ["gemma-3-4b", "gpt-oss-20b", "qwen3.5-27b"])
def test_equal_shares_are_allowed_and_one_part_more_is_not(reference: str) -> None:
    model = describe_model(reference)
    option = options(reference)["layer_wise"]
    family, kinds, count = FAMILIES[model.architecture], described_kinds(model), model.num_layers
    for parts in option.even_parts:
        size = count // parts
        assert all(slice_problem(family, i, i + size, count, kinds) is None for i in range(0, count, size))
    assert option.max_parts < count


def test_a_model_that_no_slice_can_repeat() -> None:
    option = options("gemma-3-27b")["layer_wise"]
    assert not option.possible
    assert "62 layers" in option.note


def test_an_architecture_that_is_not_proved_says_so() -> None:
    option = options("grok-1")["layer_wise"]
    assert option.possible
    assert "not proved" in option.note


def test_a_hugging_face_folder_is_cut_anywhere(tmp_path: Path) -> None:
    folder = write_llama_folder(tmp_path, config={"model_type": "grok"})
    assert options(folder)["layer_wise"].note == "at any layer"


def test_one_key_head_and_no_attention() -> None:
    assert not options("falcon-7b")["tensor_parallel"].possible
