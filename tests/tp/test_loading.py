"""Each rank reads its slices only; what was saved at W ranks loads at W' ranks, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardwise.errors import CorruptWeightsError, UsageError
from shardwise.tp import LoneCollectives, TensorParallelConfig, empty_model, load_sharded
from shardwise.tp.loading import open_source
from tests.tp import cases_loading
from tests.tp.ranks import Ranks

SHARES = {1: [None], 2: [None, [5, 3]], 3: [None, [2, 0, 1]], 4: [[1, 2, 3, 4]]}


@pytest.mark.parametrize(("saved", "saved_shares"), [(2, None), (2, [5, 3]), (3, [2, 0, 1])])
def test_save_at_w_load_at_others(
    ranks: Callable[[int], Ranks], tmp_path: Path, saved: int, saved_shares: list[float] | None
) -> None:
    ranks(saved).run("tests.tp.cases_loading:save", folder=str(tmp_path), shares=saved_shares, full=False)
    for world in (1, 2, 3):
        for shares in SHARES[world]:
            for result in ranks(world).run("tests.tp.cases_loading:load", folder=str(tmp_path), shares=shares):
                assert result["exact"], (world, shares)
                assert result["forward"] <= 1e-5, (world, shares)


def test_full_file_from_rank_zero_loads_anywhere(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    ranks(3).run("tests.tp.cases_loading:save", folder=str(tmp_path), shares=[2, 0, 1], full=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    for result in ranks(2).run("tests.tp.cases_loading:load", folder=str(tmp_path), shares=[5, 3], mapped=True):
        assert result["exact"]


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gemma3"])
def test_transformers_folder_of_several_files(ranks: Callable[[int], Ranks], tmp_path: Path, name: str) -> None:
    for result in ranks(2).run("tests.tp.cases_loading:language_folder", folder=str(tmp_path), name=name, shares=[2, 1]):
        assert result["files"] > 1
        assert result["exact"]
        assert result["logits"] <= 1e-5


def test_peak_memory_is_own_share_and_one_slice(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """Allowed beyond own share (bf16) and one slice (fp32): 6 MiB for the allocator, the reader and Python."""
    width, depth = 768, 6
    model = cases_loading.build(width=width, depth=depth, bias=False)
    save_file(model.state_dict(), str(tmp_path / "model.safetensors"))
    del model
    for shares in (None, [3, 1]):
        for result in ranks(2).run(
            "tests.tp.cases_loading:memory", folder=str(tmp_path), shares=shares, dtype="bfloat16", width=width, depth=depth
        ):
            assert result["peak"] <= result["own"] + result["slice"] + 6 * 2**20, result
            assert result["peak"] < 0.6 * result["full"], result


def test_handing_out_weights_sends_each_rank_its_part(ranks: Callable[[int], Ranks]) -> None:
    results = ranks(3).run("tests.tp.cases_loading:hand_out", shares=[2, 1, 1])
    assert all(result["exact"] for result in results)
    assert results[0]["send"] == sum(result["own_split"] for result in results[1:])


def test_what_is_missing_or_wrong_is_named(tmp_path: Path) -> None:
    state = cases_loading.build().state_dict()
    lone = TensorParallelConfig(group=LoneCollectives())
    without = {name: tensor for name, tensor in state.items() if name != "blocks.1.down.weight"}
    save_file(without, str(tmp_path / "a.safetensors"))
    with pytest.raises(UsageError, match=r"lacks 'blocks\.1\.down\.weight'.*rule 'blocks\.\*\.down'"):
        load_sharded(empty_model(cases_loading.Stack), tmp_path / "a.safetensors", lone, cases_loading.PACKED_PLAN)
    save_file(state | {"embed.weight": torch.zeros(3, 3)}, str(tmp_path / "b.safetensors"))
    model = empty_model(cases_loading.Stack)
    with pytest.raises(UsageError, match=r"\(3, 3\) for a tensor of \(61, 48\).*embed\.weight"):
        load_sharded(model, tmp_path / "b.safetensors", lone, cases_loading.PACKED_PLAN)
    assert model.embed.weight.is_meta  # untouched
    (tmp_path / "c.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(CorruptWeightsError, match=r"c\.safetensors"):
        open_source(tmp_path / "c.safetensors")
    with pytest.raises(UsageError, match="does not exist"):
        open_source([tmp_path / "d.safetensors"])
