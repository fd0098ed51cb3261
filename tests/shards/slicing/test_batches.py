"""Several sessions of unequal length in one batch: every slice keeps each session's rows together.

llama.cpp cuts such a batch into graphs in an order of its own (`row_order`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shardwise.shards.stage_paths import StageFiles
from shardwise.stage.backend import BatchSegment
from shardwise.stage.llama.backend import LlamaCppBackend
from shardwise.stage.llama.row_order import graph_order
from tests.shards.slicing.conftest import MakeTiny
from tests.shards.slicing.harness import SETTINGS, Floats, cut, prompt
from tests.tiny_models import SPECS, vocab_size

SLOTS, LENGTHS = (2, 0, 3, 1), (7, 3, 9, 1)


def logits(files: Sequence[StageFiles], batches: Sequence[Sequence[int]]) -> Floats:
    """[4, V]: the last row of each session, the sessions grouped into batches by index."""
    tokens, starts = prompt(vocab_size(), sum(LENGTHS)), np.cumsum([0, *LENGTHS])
    settings = msgspec.structs.replace(SETTINGS, max_sessions=4)
    out = np.zeros((len(SLOTS), vocab_size()), dtype=np.float32)
    with ExitStack() as stack:
        stages = [stack.enter_context(closing(LlamaCppBackend(part, settings))) for part in files]
        for batch in batches:
            segments = [BatchSegment(slot=SLOTS[i], position=0, num_tokens=LENGTHS[i], sample=True) for i in batch]
            x = stages[0].embed(np.concatenate([tokens[starts[i] : starts[i + 1]] for i in batch]))
            for stage in stages[:-1]:
                activations = stage.forward(segments, x).activations_TH
                assert activations is not None
                x = activations
            found = stages[-1].forward(segments, x).logits_SV
            assert found is not None
            out[list(batch)] = found
    return out


@pytest.mark.parametrize("name", ["llama", "llama/moe", "gemma2", "gemma3", "glm4", "gpt-oss", "lfm2", "qwen35"])
def test_sessions_of_unequal_length_do_not_mix(name: str, tiny: MakeTiny, tmp_path: Path) -> None:
    """Tolerance: 1% of the logits' spread, for kernels that round differently in other shapes; mixed rows are off by 400%."""
    cut_at = {"lfm2": 3, "qwen35": 4}.get(name, 2)
    files = cut(tiny(name), [cut_at], SPECS[name].computed_layers, tmp_path)
    together, alone = logits(files, [range(4)]), logits(files, [[0], [1], [2], [3]])
    assert np.abs(together - alone).max() < 0.01 * alone.std()


@pytest.mark.parametrize(
    ("lengths", "slots", "expected"),
    [
        ([3], [5], [0, 1, 2]),
        ([1, 1, 1], [0, 1, 2], [0, 1, 2]),
        ([3, 1], [0, 1], [0, 3, 1, 2]),
        ([1, 1, 1], [1, 0, 2], [0, 2, 1]),  # only consecutive sequences share a graph
        ([2, 2], [0, 3], [0, 1, 2, 3]),
    ],
)
def test_graph_order(lengths: list[int], slots: list[int], expected: list[int]) -> None:
    assert graph_order(lengths, slots) == expected
