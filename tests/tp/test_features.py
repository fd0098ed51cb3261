"""Adapters, meshes, staging, less traffic, sampling over a split vocabulary, torch.compile, lost ranks.

Tolerances: 1e-5 relative for exact fp32 paths (see test_styles); compressed sums have their own stated bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from shardwise.tp.threads import run_ranks
from tests.tp.contract import check_collectives
from tests.tp.ranks import RankFailed, Ranks

CASES = "tests.tp.cases_features:"


@pytest.mark.parametrize("kind", ["dist", "staged", "compressed"])
@pytest.mark.parametrize("world", [2, 3])
def test_collectives_contract(ranks: Callable[[int], Ranks], world: int, kind: str) -> None:
    for result in ranks(world).run(CASES + "contract", kind=kind):
        assert all(result.values()), result


@pytest.mark.parametrize("world", [1, 2, 4])
def test_collectives_contract_of_threads(world: int) -> None:
    for result in run_ranks(world, check_collectives) if world > 1 else []:
        assert all(result.values()), result


@pytest.mark.parametrize("shares", [None, [2, 1]])
def test_lora_before_the_split_is_split_along(ranks: Callable[[int], Ranks], shares: list[float] | None) -> None:
    for result in ranks(2).run(CASES + "lora", shares=shares):
        assert max(result["forward"], result["grads"], result["step"]) <= 1e-5, result
        assert result["gather_exact"]
        assert result["b_is_split"]
        assert result["a_is_split"]


def test_data_parallel_times_tensor_parallel_on_one_mesh(ranks: Callable[[int], Ranks]) -> None:
    for rank, result in enumerate(ranks(4).run(CASES + "mesh")):
        assert result["grads"] <= 1e-5
        assert "no axis 'cp'" in result["error"]
        assert "dp, tp" in result["error"]
        assert result["group"] == [rank % 2, 2]


def test_staging_through_the_cpu(ranks: Callable[[int], Ranks]) -> None:
    for result in ranks(2).run(CASES + "staged"):
        assert max(result["forward"], result["grads"], result["handed_out"]) <= 1e-5
        assert result["exact"]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("world", [2, 3])
def test_compressed_sums_stay_within_their_bound(ranks: Callable[[int], Ranks], world: int, kind: str) -> None:
    for scale in (1e-4, 1.0, 1e4):
        for result in ranks(world).run(CASES + "compression", kind=kind, scale=scale):
            assert result["within"], result
            assert result["tightness"] > 0.05, "the bound says nothing"
            assert result["same"]
            assert result["small_exact"]
            assert result["sent"] <= 0.3


def test_less_traffic_in_a_model(ranks: Callable[[int], Ranks]) -> None:
    for result in ranks(2).run(CASES + "less_traffic", compression="int8", chunks=1):
        assert result["calls"] == {"all_reduce_compressed": 1}
        assert result["forward"] <= 0.02
    for result in ranks(2).run(CASES + "less_traffic", compression=None, chunks=4):
        assert result["calls"] == {"all_reduce": 4}
        assert result["forward"] <= 1e-5


@pytest.mark.parametrize(("world", "shares"), [(2, None), (2, [3, 1]), (3, [2, 0, 1])])
def test_sampling_over_a_split_vocabulary(ranks: Callable[[int], Ranks], world: int, shares: list[float] | None) -> None:
    for vocab, valid in ((97, None), (128, 101)):
        for result in ranks(world).run(CASES + "sampling", vocab=vocab, valid=valid, shares=shares):
            assert all(result.values()), result


def test_inference_mode(ranks: Callable[[int], Ranks]) -> None:
    for result in ranks(2).run(CASES + "inference_mode"):
        assert result["logits"] <= 1e-5
        assert result["exact"]
        assert result["undone"]


def test_torch_compile_keeps_one_graph(ranks: Callable[[int], Ranks]) -> None:
    for result in ranks(2).run(CASES + "compiled", backend="aot_eager", shares=[2, 1]):
        assert max(result.values()) <= 1e-5, result


@pytest.mark.soak
@pytest.mark.parametrize("shares", [None, [2, 1]])
def test_torch_compile_with_inductor(ranks: Callable[[int], Ranks], shares: list[float] | None) -> None:
    for result in ranks(2).run(CASES + "compiled", timeout_s=600.0, backend="inductor", shares=shares):
        assert max(result.values()) <= 1e-5, result


@pytest.fixture
def own_ranks() -> Iterator[Ranks]:
    group = Ranks(3)
    yield group
    group.kill()
    group.close()


def test_a_killed_rank_makes_the_others_raise(own_ranks: Ranks) -> None:
    timeout_s = 15.0
    for rank in range(3):
        own_ranks.send(rank, CASES + "lost_rank", timeout_s=timeout_s, victim=1)
    for rank in (0, 2):
        result = own_ranks.read(rank, 90.0)["result"]
        assert result["error"] in ("PeerClosed", "ReplyTimeout"), result
        assert result["took_s"] <= timeout_s + 2
        assert "every rank must be alive" in result["message"]
    with pytest.raises(RankFailed, match="ended with -9"):
        own_ranks.read(1, 10.0)


def test_a_rank_that_stops_answering_makes_the_others_raise(own_ranks: Ranks) -> None:
    timeout_s = 3.0
    for rank in range(3):
        own_ranks.send(rank, CASES + "stopped_rank", timeout_s=timeout_s, sleeper=2)
    for rank in (0, 1):
        result = own_ranks.read(rank, 60.0)["result"]
        assert result["error"] in ("ReplyTimeout", "PeerClosed"), result
        assert result["took_s"] <= timeout_s + 5, result
