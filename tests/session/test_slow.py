"""Which stage became slow; pure, from figures."""

from __future__ import annotations

import pytest

from shardwise.session.slow import LOOKS, SlowWatch, rebalanced
from shardwise.transport.messages import Quantiles, Stats


class Stages:
    """Cumulative figures, as workers send them."""

    def __init__(self, num: int) -> None:
        self.n, self.total = [0] * num, [0.0] * num

    def look(self, *step_s: float) -> dict[int, Stats]:
        none = Quantiles()
        for stage, seconds in enumerate(step_s):
            self.n[stage] += 50
            self.total[stage] += 50 * seconds
        return {
            stage: Stats(
                stage=stage, sequence=0, pid=1, sessions=1, kv_tokens=1, peak_memory_bytes=1, memory_bytes=1, prefill=none,
                decode=Quantiles(n=self.n[stage], total=self.total[stage], p50=seconds), wait=none, queue=none, transfer=none,
                copy=none, decode_rows=1, prefill_tokens=0, received_bytes=0, sent_bytes=0,
            )
            for stage, seconds in enumerate(step_s)
        }  # fmt: skip


def test_one_stage_that_becomes_slow_is_named() -> None:
    watch, stages = SlowWatch(), Stages(3)
    for _ in range(5):
        assert watch.take(stages.look(0.004, 0.005, 0.004)) == []
    found = [watch.take(stages.look(0.004, 0.020, 0.004)) for _ in range(LOOKS)]
    assert found[:-1] == [[]] * (LOOKS - 1)
    (slow,) = found[-1]
    assert slow.stage == 1
    assert slow.ratio == pytest.approx(4.0)
    assert "stage 1 takes 20.0 ms" in slow.sentence()


def test_all_slow_together_is_nobody() -> None:
    watch, stages = SlowWatch(), Stages(2)
    for _ in range(5):
        watch.take(stages.look(0.004, 0.005))
    assert all(watch.take(stages.look(0.016, 0.020)) == [] for _ in range(10))


def test_a_hiccup_is_not_slowness_and_a_reset_not_a_time() -> None:
    watch, stages = SlowWatch(), Stages(2)
    for step_s in (0.005, 0.005, 0.005, 0.05, 0.005, 0.05, 0.05, 0.005):
        assert watch.take(stages.look(0.004, step_s)) == []
    assert watch.take(Stages(2).look(0.004, 0.004)) == []


def test_a_prediction_is_history_from_the_beginning() -> None:
    watch, stages = SlowWatch({0: 0.004, 1: 0.004}), Stages(2)
    found = [watch.take(stages.look(0.004, 0.040)) for _ in range(LOOKS)]
    assert [s.stage for s in found[-1]] == [1]


@pytest.mark.parametrize(
    ("layers", "step_s", "expected"),
    [
        ([10, 10, 10], (0.01, 0.01, 0.01), (10, 10, 10)),
        ([10, 10, 10], (0.01, 0.04, 0.01), (14, 3, 13)),
        ([1, 29], (1.0, 0.1), (1, 29)),
    ],
)
def test_layers_move_to_where_they_are_fast(layers: list[int], step_s: tuple[float, ...], expected: tuple[int, ...]) -> None:
    assert rebalanced(layers, dict(enumerate(step_s))) == expected
