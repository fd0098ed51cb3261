"""The cache of measured rates returns what was measured under exactly the same conditions, or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import UsageError
from shardwise.machines import Measurement, ProfileCache, RateKey, RateTable

KEY = RateKey(device="cpu Xeon, 1 thread", quantization="Q4_1", library="llama.cpp 0.3.36", kernel="openblas")
RATES = RateTable(
    quantization="Q4_1",
    library="llama.cpp 0.3.36 openblas",
    compute_flops_per_s=Measurement(value=7e11, spread=1e10, n=20, method="layer", when="2026-11-30"),
    weight_bytes_per_s=Measurement(value=1.2e10),
)


def test_same_key_same_rates_any_other_key_nothing(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path / "deep" / "cache")
    assert cache.get(KEY) is None
    cache.put(KEY, RATES)
    assert cache.get(KEY) == RATES
    for field in ("device", "quantization", "library", "kernel"):
        values = {name: getattr(KEY, name) for name in KEY.__struct_fields__} | {field: "other"}
        assert cache.get(RateKey(**values)) is None
    assert cache.get(RateKey(device=KEY.device, quantization="Q4_1", library=KEY.library, kernel=KEY.kernel, format=2)) is None


def test_a_broken_entry_counts_as_absent(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.put(KEY, RATES)
    next(tmp_path.iterdir()).write_text("{")
    assert cache.get(KEY) is None


def test_a_folder_that_cannot_be_made_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="profile cache"):
        ProfileCache(tmp_path / "file" / "cache").put(KEY, RATES)
