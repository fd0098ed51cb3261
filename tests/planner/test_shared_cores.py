"""Stages on one machine share its cores; prompts get their turn; cold connections; attention beyond a timed layer's block."""

from __future__ import annotations

import pytest

from shardwise.machines.profile import LinkProfile, Measurement
from shardwise.planner.cost_links import FIRST_WINDOW_BYTES, cold_start_s
from shardwise.planner.cost_tails import DECODE_TURNS, HopTiming, RingTiming, simulate_ring

STILL = HopTiming(0.0, 0.0, 0.0, 0.0, 0.0)


def ring(stages: int, chunks: int, *, groups: tuple[int, ...] = (), speeds: tuple[float, ...] = (1.0,)) -> RingTiming:
    return RingTiming([[0.01]] * stages, [[0.1] * chunks] * stages, [STILL] * stages, 1, 0.0, groups, speeds)


def test_a_pipeline_on_cores_of_its_own_overlaps_chunks() -> None:
    out = simulate_ring(ring(3, 4), 1, 1)
    assert out.first_token_s[0] == pytest.approx(0.1 * (3 + 4 - 1))


def test_one_core_for_all_stages_takes_the_sum_of_all_work() -> None:
    out = simulate_ring(ring(3, 4, groups=(0, 0, 0), speeds=(1.0, 0.5, 1 / 3)), 1, 1)
    assert out.first_token_s[0] == pytest.approx(0.1 * 3 * 4)


def test_two_cores_for_four_stages_lie_between() -> None:
    own = simulate_ring(ring(4, 8), 1, 1).first_token_s[0]
    two = simulate_ring(ring(4, 8, groups=(0,) * 4, speeds=(1.0, 1.0, 2 / 3, 0.5)), 1, 1).first_token_s[0]
    assert own < two
    assert two >= 0.1 * 4 * 8 / 2


def test_decode_alone_in_a_ring_never_shares() -> None:
    alone = simulate_ring(ring(3, 1), 1, 20)
    shared = simulate_ring(ring(3, 1, groups=(0,) * 3, speeds=(1.0, 0.5, 1 / 3)), 1, 20)
    assert alone.gaps_s == pytest.approx(shared.gaps_s)


def test_a_waiting_prompt_gets_its_turn_between_decode_steps() -> None:
    out = simulate_ring(ring(1, 5), 2, 200)
    second = sorted(out.first_token_s)[1]
    assert second == pytest.approx(0.1 * 10 + 0.01 * DECODE_TURNS * 5, abs=0.06)


def _link(latency_s: float, rate: float = 125e6) -> LinkProfile:
    return LinkProfile(source="a", target="b", bytes_per_s=Measurement(value=rate), latency_s=Measurement(value=latency_s))


def test_a_cold_connection_needs_a_round_trip_each_time_its_window_doubles() -> None:
    assert cold_start_s(_link(0.02), FIRST_WINDOW_BYTES) == 0.0
    assert cold_start_s(_link(0.02), 7 * FIRST_WINDOW_BYTES) == pytest.approx(3 * 0.04)
    assert cold_start_s(_link(0.0001), 300_000) < 0.001
