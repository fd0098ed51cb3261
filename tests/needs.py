"""Marks for tests that need what not every machine has. Where it is missing they say so and skip; CI never skips them."""

from __future__ import annotations

import os

import pytest

from shardwise.bench.lab import lab_unavailable

IN_CI = bool(os.environ.get("CI"))
needs_lab = pytest.mark.skipif(
    lab_unavailable() is not None and not IN_CI, reason=f"{lab_unavailable()}; run as root on Linux"
)  # network namespaces, mounts
