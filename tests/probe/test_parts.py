"""Statistics, memory, compute, disk, synthetic layers: each part on its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.clock import ManualClock, SystemClock
from shardwise.errors import StageLoadFailed, UsageError
from shardwise.machines.profile import RateTable
from shardwise.probe import compute, disk, memory
from shardwise.probe.devices import kind_of, list_accelerators
from shardwise.probe.layer_task import LayerResult, RowSamples
from shardwise.probe.layers import kv_table, rate_table
from shardwise.probe.links import link_kind
from shardwise.probe.node import cpu_model
from shardwise.probe.plausible import Ceilings, why_impossible
from shardwise.probe.statistics import measurement, percentile
from shardwise.probe.synthetic import SUPPORTED, TYPICAL, LayerShape, random_matrix, write_layers

CLOCK = SystemClock()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_percentiles_are_numpys(samples: list[float], share: float) -> None:
    assert percentile(samples, share) == pytest.approx(float(np.percentile(samples, share * 100)), abs=1e-6)


def test_a_measurement_tells_how_it_came_about() -> None:
    found = measurement([1.0, 2.0, 3.0, 4.0, 100.0], "by hand", ManualClock(0.0))
    assert (found.value, found.spread, found.n, found.method) == (3.0, 2.0, 5, "by hand")
    assert found.when == "1970-01-01T00:00:00+00:00"
    assert measurement([5.0], "once", CLOCK).spread == 0.0


def test_memory_and_compute_are_of_a_plausible_size() -> None:
    assert all(0.2e9 < rate < 5e12 for rate in memory.triad_samples(32 * 2**20, 1, 0.05, CLOCK))
    assert all(0.2e9 < rate < 1e15 for rate in compute.compute_samples(0.05, CLOCK))


def test_the_disk_probe_leaves_nothing_and_says_how_it_read(tmp_path: Path) -> None:
    samples, method = disk.disk_samples(tmp_path / "new", 8 * 2**20, 2, CLOCK)
    assert len(samples) == 2
    assert all(rate > 1e6 for rate in samples)
    assert "8 MiB" in method
    assert list((tmp_path / "new").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UsageError, match="no disk probe"):
        disk.disk_samples(blocked / "below", 2**20, 1, CLOCK)


@pytest.mark.parametrize("quantization", SUPPORTED)
def test_random_blocks_dequantize_to_finite_weights(quantization: str) -> None:
    """Every kernel must see ordinary numbers: infinities and denormals have speeds of their own."""
    from gguf import GGMLQuantizationType, quants

    data = random_matrix(np.random.default_rng(1), quantization, 8, 512)
    values = quants.dequantize(data, GGMLQuantizationType[quantization])
    assert values.shape == (8, 512)
    assert np.isfinite(values).all()
    assert 0 < np.abs(values).max() < 10


def test_an_unknown_quantization_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no synthetic layer in Q9") as caught:
        write_layers(tmp_path / "x.gguf", TYPICAL, "Q9", 1)
    assert "Q4_K" in caught.value.hint


def test_layer_sizes_are_those_of_the_file(tmp_path: Path) -> None:
    shape = LayerShape(hidden=256, heads=4, kv_heads=2, feed_forward=512)
    one = write_layers(tmp_path / "1.gguf", shape, "Q8_0", 1)
    three = write_layers(tmp_path / "3.gguf", shape, "Q8_0", 3)
    assert (three.weight_bytes - one.weight_bytes) / 2 == pytest.approx(shape.layer_bytes("Q8_0"), rel=0.02)
    assert (three.start, three.end, three.num_layers, three.output_node) == (0, 3, 4, "l_out-2")


def test_rates_follow_from_timings() -> None:
    fixed = measurement([1e-3], "small", CLOCK)
    rows = (RowSamples(rows=1, layer_s=(0.011, 0.011, 0.011)), RowSamples(rows=64, layer_s=(0.05, 0.05)))
    table = rate_table("Q4_K", LayerResult(library="llama.cpp 1 openblas", blas=False, rows=rows), 10**7, 2e7, fixed, "m", CLOCK)
    assert table.weight_bytes_per_s.value == pytest.approx(1e9)
    assert table.compute_flops_per_s.value == pytest.approx(64 * 2e7 / 0.05)
    assert [(t.rows, t.layer_s.value) for t in table.timings] == [(1, 0.011), (64, 0.05)]
    assert table.library == "llama.cpp 1"


def kv_timings(far_s: float, far_chunk_s: float) -> LayerResult:
    """256 rows take long, 1 row and 64 rows as given."""
    rows = [
        RowSamples(rows=1, layer_s=(1e-3,) * 5),
        RowSamples(rows=64, layer_s=(4e-3,) * 2),
        RowSamples(rows=256, layer_s=(9.0,)),
    ]
    return LayerResult(
        library="l", blas=False, rows=tuple(rows), far_layer_s=(far_s,) * 5, far_prefill_layer_s=(far_chunk_s,) * 2
    )


def test_what_the_kv_cache_costs_follows_from_what_takes_longer_after_many_positions() -> None:
    table = kv_table("f16", 2.0, kv_timings(3e-3, 24e-3), CLOCK)
    assert table.quantization == "KV_F16"
    assert table.weight_bytes_per_s.value == pytest.approx(2 * 1024 * 2.0 * 2048 / 2e-3)  # keys and values of 2048 positions
    assert table.compute_flops_per_s.value == pytest.approx(64 * 2048 * 4 * 1024 / 20e-3)
    for lost in (kv_timings(1e-3, 24e-3), kv_timings(3e-3, 3e-3)):
        with pytest.raises(StageLoadFailed, match="lost in the noise"):
            kv_table("f16", 2.0, lost, CLOCK)


def rates(reads: float, computes: float) -> RateTable:
    by_hand = [measurement([value], "by hand", CLOCK) for value in (reads, computes)]
    return RateTable(quantization="KV_F16", library="l", weight_bytes_per_s=by_hand[0], compute_flops_per_s=by_hand[1])


@pytest.mark.parametrize(
    ("reads", "computes", "words"),
    [
        (8e9, 150e9, ""),
        (100e9, 2e12, ""),  # layers in the last-level cache, int8 units
        (8e9, 23.5e12, "no such processor computes 23.5 TFLOP/s"),  # 256 rows divided by one row's time
        (8e16, 150e9, "no such processor reads"),  # a difference of 0
        (float("nan"), 150e9, "is no rate or time"),
        (8e9, float("inf"), "is no rate or time"),
        (-8e9, 150e9, "is no rate or time"),
    ],
)
def test_a_figure_that_cannot_be_is_told_from_a_fast_machine(reads: float, computes: float, words: str) -> None:
    cpu = Ceilings.of_cpu(measurement([8e9], "triad", CLOCK), measurement([470e9], "product", CLOCK))
    against = why_impossible(rates(reads, computes), cpu)
    assert words in against
    assert bool(words) == bool(against)
    assert why_impossible(rates(4.8e12, 2e15), Ceilings()) == ""  # the largest GPUs


@pytest.mark.parametrize(
    ("name", "kind"), [("CUDA0", "cuda"), ("ROCm1", "cuda"), ("MTL0", "metal"), ("Metal", "metal"), ("Vulkan0", "vulkan")]
)
def test_kinds_of_accelerators(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_this_machine_can_be_asked_for_accelerators() -> None:
    assert all(device.total_bytes >= device.free_bytes > 0 for device in list_accelerators())
    assert cpu_model()


@pytest.mark.parametrize(
    ("card", "latency_s", "same", "kind"),
    [
        ("wlan0", 1e-3, False, "wifi"),
        ("eth0", 1e-4, False, "ethernet"),
        ("", 0.02, False, "wan"),
        ("wlan0", 1e-4, True, "loopback"),
    ],
)
def test_kinds_of_links(card: str, latency_s: float, same: bool, kind: str) -> None:
    assert link_kind(card, latency_s, same_machine=same) == kind
