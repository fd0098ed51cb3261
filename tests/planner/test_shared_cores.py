"""Stages on one machine share its cores; prompts get their turn; cold connections; attention beyond a timed layer's block."""

from __future__ import annotations

import pytest

from shardwise.machines.profile import LinkProfile, Measurement
from shardwise.planner.cost_links import FIRST_WINDOW_BYTES, cold_start_s
from shardwise.planner.cost_tails import DECODE_TURNS, HopTiming, RingTiming, simulate_ring

STILL = HopTiming(0.0, 0.0, 0.0, 0.0, 0.0)


def ring(stages: int, chunks: int, *, cores: float = 0.0, message_cpu_s: float = 0.0, step_s: float = 0.01) -> RingTiming:
    groups = (0,) * stages if cores else ()
    decode, prompt = [[step_s]] * stages, [[0.1] * chunks] * stages
    return RingTiming(decode, prompt, [STILL] * stages, 1, 0.0, groups, cores, message_cpu_s=message_cpu_s)


def test_a_pipeline_on_cores_of_its_own_overlaps_chunks() -> None:
    out = simulate_ring(ring(3, 4), 1, 1)
    assert out.first_token_s[0] == pytest.approx(0.1 * (3 + 4 - 1))


def test_one_core_for_all_stages_takes_the_sum_of_all_work() -> None:
    out = simulate_ring(ring(3, 4, cores=1), 1, 1)
    assert out.first_token_s[0] == pytest.approx(0.1 * 3 * 4)


def test_a_core_for_each_stage_is_as_good_as_machines_of_their_own() -> None:
    own, together = (simulate_ring(ring(2, 6, cores=cores), 2, 40) for cores in (0.0, 2.0))
    assert own.gaps_s == pytest.approx(together.gaps_s)
    assert own.first_token_s == pytest.approx(together.first_token_s)


def test_two_cores_for_four_stages_lie_between() -> None:
    own = simulate_ring(ring(4, 8), 1, 1).first_token_s[0]
    two = simulate_ring(ring(4, 8, cores=2), 1, 1).first_token_s[0]
    assert own < two
    assert 0.1 * 4 * 8 / 2 <= two < 1.2 * (0.1 * 4 * 8 / 2 + 0.2)  # long steps are moved to the idle core


def test_half_a_core_takes_twice_as_long() -> None:
    assert simulate_ring(ring(1, 3, cores=0.5), 1, 1).first_token_s[0] == pytest.approx(0.6)


def test_decode_alone_in_a_ring_never_shares() -> None:
    alone = simulate_ring(ring(3, 1), 1, 20)
    shared = simulate_ring(ring(3, 1, cores=2), 1, 20)
    assert alone.gaps_s == pytest.approx(shared.gaps_s)


def test_two_users_on_more_stages_than_cores_are_in_each_others_way() -> None:
    """Short steps end before the scheduler has moved them: measured 1.2 to 1.5 times the time of free placement."""
    free = simulate_ring(ring(4, 1, step_s=0.002), 2, 200)
    crowded = simulate_ring(ring(4, 1, cores=2, step_s=0.002), 2, 200)
    ratio = sum(crowded.gaps_s) / sum(free.gaps_s)
    assert 1.1 < ratio < 1.6


def test_moving_messages_takes_cores_too() -> None:
    quiet, busy = (simulate_ring(ring(2, 1, cores=2, message_cpu_s=cpu_s), 2, 100) for cpu_s in (0.0, 0.004))
    assert sum(busy.gaps_s) > 1.05 * sum(quiet.gaps_s)


def test_disturbances_even_out_over_long_steps() -> None:
    def spread(chunk_s: float) -> float:
        timing = RingTiming([[0.01]], [[chunk_s] * 200], [STILL], 1, 0.2)
        total_s = simulate_ring(timing, 1, 1).first_token_s[0]
        return abs(total_s / (200 * chunk_s) - 1)

    assert spread(1.0) < 0.2 / 200**0.5
    assert spread(0.01) < 0.2 * 4 / 200**0.5


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
