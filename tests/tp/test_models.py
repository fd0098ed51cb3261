"""Real architectures at tiny sizes: outputs and greedy tokens at every step equal to the unsharded model.

Tolerance 1e-5 relative to the largest logit: fp32 sums in another order (see test_styles). Tokens must be equal at each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.tp.ranks import Ranks

LANGUAGE = ["llama", "qwen3", "qwen3_moe", "mixtral", "phi3", "gemma3"]
DIFFUSION = ["flux", "flux2", "qwen_image", "wan"]
UNEVEN = [3, 2, 1, 2]
WITH_EMPTY = [3, 0, 1, 2]


def check(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        assert result.get("logits", result.get("forward")) <= 1e-5, (rank, result)
        assert result.get("grads", 0.0) <= 1e-5, (rank, result)
        assert result.get("tokens_equal", True), (rank, result)
        assert result["gather_exact"], (rank, result)


EVERY_WAY = pytest.mark.parametrize("every_way", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["some", "all"])
"""By default each model at each number of ranks, even or uneven in turn; under soak each in every way."""


@EVERY_WAY
@pytest.mark.parametrize("name", LANGUAGE)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_language_models(ranks: Callable[[int], Ranks], world: int, name: str, every_way: bool) -> None:
    group, case = ranks(world), "tests.tp.cases_models:language"
    if every_way or world != 3:
        check(group.run(case, name=name, heads=12, kv_heads=4, shares=None, train=world == 2))
    if every_way or world == 3:  # fewer KV heads than ranks: they are replicated; unequal machines
        check(group.run(case, name=name, heads=12, kv_heads=2, shares=UNEVEN[:world], train=world == 3))
    if world == 3:
        check(group.run(case, name=name, heads=6, kv_heads=2, shares=WITH_EMPTY[:world], train=True))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_phi3_with_its_fused_projections_really_split(ranks: Callable[[int], Ranks], world: int) -> None:
    """transformers gathers the fused outputs and computes attention everywhere; a packed plan does not."""
    for shares in (None, WITH_EMPTY[:world]):
        check(
            ranks(world).run(
                "tests.tp.cases_models:language", name="phi3", heads=12, kv_heads=4, shares=shares, plan="packed", train=True
            )
        )


@pytest.mark.parametrize(
    ("name", "plan"),
    [("minimax_m2", "own"), ("olmo2", "own"), ("deepseek_v3", "own"), ("deepseek_v3", "heads"), ("gpt2", "packed")],
)
def test_norms_over_all_heads_latent_attention_and_transposed_weights(
    ranks: Callable[[int], Ranks], name: str, plan: str
) -> None:
    for shares in (None, [5, 3]):
        check(
            ranks(2).run("tests.tp.cases_models:language", name=name, heads=12, kv_heads=4, shares=shares, plan=plan, train=True)
        )


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("world", [2, 3])
def test_whole_experts_per_rank(ranks: Callable[[int], Ranks], world: int, name: str) -> None:
    for shares in (None, WITH_EMPTY[:world]):
        check(
            ranks(world).run(
                "tests.tp.cases_models:language",
                name=name,
                heads=12,
                kv_heads=4,
                shares=shares,
                plan="expert_parallel",
                train=True,
            )
        )


@EVERY_WAY
@pytest.mark.parametrize("name", DIFFUSION)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_diffusion_models(ranks: Callable[[int], Ranks], world: int, name: str, every_way: bool) -> None:
    uneven = UNEVEN[:world] if world != 3 else WITH_EMPTY[:world]
    ways = (None, uneven) if every_way else {2: (None,), 3: (uneven,), 4: (uneven,)}[world]
    for shares in ways:
        check(ranks(world).run("tests.tp.cases_diffusion:diffusion", name=name, shares=shares, train=True))
