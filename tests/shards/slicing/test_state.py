"""The state of a session in a slice: it can be carried to another context, and single positions can be forgotten.

Both are what recovery and migration stand on. Tolerance: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from shardwise.errors import RemoteFailure
from shardwise.model.families import FAMILIES
from shardwise.stage.backend import BatchSegment
from shardwise.stage.llama.backend import LlamaCppBackend
from tests.shards.slicing.conftest import MakeTiny
from tests.shards.slicing.harness import SETTINGS, Floats, cut, prompt
from tests.tiny_models import SPECS, vocab_size

PROMPT, DECODE = 30, 3
CUTS = {"qwen35": 4, "lfm2": 3, "nemotron_h": 3, "gemma4": 3}
NAMES = ["deepseek2", "falcon-h1", "gemma3", "gemma4", "glm4", "gpt-oss", "lfm2", "llama", "mamba2", "nemotron_h", "qwen35"]


def run(stages: Sequence[LlamaCppBackend], slot: int, position: int, num_tokens: int) -> Floats:
    """Logits [V] after tokens [position, position + num_tokens) of the one prompt that all tests use."""
    tokens = prompt(vocab_size(), PROMPT + 2 * DECODE)[position : position + num_tokens]
    segment = BatchSegment(slot=slot, position=position, num_tokens=num_tokens, sample=True)
    x = stages[0].embed(tokens)
    for stage in stages[:-1]:
        activations = stage.forward([segment], x).activations_TH
        assert activations is not None
        x = activations
    logits = stages[-1].forward([segment], x).logits_SV
    assert logits is not None
    return logits[0].copy()


def decode(stages: Sequence[LlamaCppBackend], slot: int) -> list[Floats]:
    return [run(stages, slot, PROMPT + i, 1) for i in range(DECODE)]


@pytest.mark.parametrize("name", NAMES)
def test_a_session_goes_on_elsewhere_and_positions_are_forgotten(name: str, tiny: MakeTiny, tmp_path: Path) -> None:
    """Carried to another context and slot; some positions forgotten; freed and begun anew: always the same logits."""
    files = cut(tiny(name), [CUTS.get(name, 2)], SPECS[name].computed_layers, tmp_path)
    with ExitStack() as stack:
        first, second = ([stack.enter_context(closing(LlamaCppBackend(f, SETTINGS))) for f in files] for _ in range(2))
        run(first, 0, 0, PROMPT)
        states = [stage.export_kv(0) for stage in first]
        expected = decode(first, 0)

        assert [stage.import_kv(1, state) for stage, state in zip(second, states, strict=True)] == [PROMPT] * 2
        assert all(map(np.array_equal, expected, decode(second, 1)))

        if FAMILIES[SPECS[name].architecture].forgets_positions:
            for stage in first:
                stage.rollback(0, PROMPT)
            assert all(map(np.array_equal, expected, decode(first, 0)))
        else:
            with pytest.raises(RemoteFailure, match="cannot forget"):
                first[0].rollback(0, PROMPT)

        for stage in first:
            stage.rollback(0, 0)
        run(first, 0, 0, PROMPT)
        assert all(map(np.array_equal, expected, decode(first, 0)))
