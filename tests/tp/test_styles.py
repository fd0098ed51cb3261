"""Forward, gradients, one SGD step, gather and undo of every style against the unsharded module.

Tolerance: sums over ranks add in another order than one big product does, which moves fp32 results by a few units in the last
place of the largest value: 1e-5 relative to it covers sums of up to 100 terms with room to spare. bf16 keeps 8 bits: partial
results are rounded to bf16 before they are summed, and so are the sum and each following operation: a gradient passes up to 16
roundings of 2^-8 of the largest value in these two-layer modules, accumulated twice: 6.25e-2 (the worst seen is 4.7e-2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.tp.cases_styles import STYLES
from tests.tp.ranks import Ranks

SHARES: dict[int, list[list[float] | None]] = {
    1: [None, [2]],
    2: [None, [5, 3], [1, 0]],
    3: [None, [2, 1, 1], [3, 0, 1]],
    4: [None, [4, 3, 2, 1], [1, 1, 0, 2]],
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 6.25e-2}


def check(results: list[dict[str, Any]], tolerance: float) -> None:
    for rank, result in enumerate(results):
        for measure in ("forward", "grads", "step", "undo_forward"):
            assert result[measure] <= tolerance, (rank, measure, result)
        for fact in ("gather_exact", "undo_gather_exact", "undo_undo_exact", "undo_undo_forward_exact"):
            assert result[fact], (rank, fact, result)
        assert result["calls"] == result["expected_calls"], (rank, result)


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("world", [2, 3])
def test_style(ranks: Callable[[int], Ranks], world: int, name: str) -> None:
    for index, shares in enumerate(SHARES[world]):
        check(ranks(world).run("tests.tp.cases_styles:style", name=name, shares=shares, bias=index != 1), TOLERANCE["float32"])


@pytest.mark.soak
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_style_full_matrix(ranks: Callable[[int], Ranks], world: int, name: str, bias: bool, dtype: str) -> None:
    if name == "quant_blocks" and dtype != "float32":
        return  # its scales stay fp32 by construction
    for shares in SHARES[world]:
        check(ranks(world).run("tests.tp.cases_styles:style", name=name, shares=shares, bias=bias, dtype=dtype), TOLERANCE[dtype])
