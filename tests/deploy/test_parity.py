"""The ring against unsharded llama.cpp: token ids equal, greedy and sampled, at 1, 2, 3 and 5 stages.

Tolerance: none. Same library, same chunk sizes, f32 on the wire: every bit is the same (docs/adr/0003).
By default each number of stages with some of the prompts; all 32 with `-m "soak or not soak"`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shardwise.deploy import Deployment, launch_local
from shardwise.session.request import MAX_LOGPROBS
from shardwise.stage.llama import library
from shardwise.transport.messages import SamplingSettings
from tests.deploy.reference import Unsharded, unsharded

CONTEXT, CHUNK = 2048, 128


def same_blas() -> str:
    """The workers use BLAS if the reference in this process can: other tests may have unloaded it here for good."""
    return "on" if library.has_blas() else "off"


PROMPTS = {
    "question": "What is the capital of France? Answer in one sentence.",
    "story": "Once upon a time, in a land far away, there lived a",
    "code": "def fibonacci(n):\n    ",
    "long": "The quick brown fox jumps over the lazy dog. " * 110,
}
SAMPLED = SamplingSettings(
    temperature=0.9, top_k=50, top_p=0.95, min_p=0.02, typical_p=0.98, repetition_penalty=1.1, presence_penalty=0.1, seed=7
)


@pytest.fixture(scope="module")
def reference(sample_gguf: Path) -> Iterator[Unsharded]:
    with unsharded(sample_gguf, context_tokens=CONTEXT, chunk_tokens=CHUNK, quantization="Q4_1") as built:
        yield built


@pytest.fixture(scope="module")
def expected(reference: Unsharded) -> dict[tuple[str, bool], list[int]]:
    """Token ids of the unsharded model, by (prompt, sampled)."""
    return {}


class Deployments:
    """One at a time; asked for as many stages as before, the one that stands."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._standing: Deployment | None = None

    def of(self, num_stages: int) -> Deployment:
        if self._standing is None or len(self._standing.stages) != num_stages:
            self.close()
            settings = {"context_tokens": CONTEXT, "max_sessions": 1, "chunk_tokens": CHUNK, "blas": same_blas()}
            self._standing = launch_local(self._model, num_stages=num_stages, **settings)
        return self._standing

    def close(self) -> None:
        if self._standing is not None:
            self._standing.close()


@pytest.fixture(scope="module")
def deployments(sample_gguf: Path) -> Iterator[Deployments]:
    launched = Deployments(sample_gguf)
    yield launched
    launched.close()


ALWAYS = {
    (1, "story", False),
    (2, "story", False),
    (2, "question", True),
    (3, "story", False),
    (3, "long", False),
    (5, "story", False),
    (5, "code", True),
}
CASES = [
    pytest.param(
        *case, marks=() if case in ALWAYS else pytest.mark.soak, id=f"{case[0]}-{case[1]}-{'sampled' if case[2] else 'greedy'}"
    )
    for case in itertools.product((1, 2, 5, 3), PROMPTS, (False, True))
]


@pytest.mark.parametrize(("num_stages", "name", "sampled"), CASES)
def test_ids_equal_unsharded(
    deployments: Deployments,
    num_stages: int,
    name: str,
    sampled: bool,
    reference: Unsharded,
    expected: dict[tuple[str, bool], list[int]],
) -> None:
    deployment = deployments.of(num_stages)
    prompt, settings = deployment.tokenizer.encode(PROMPTS[name]), SAMPLED if sampled else SamplingSettings()
    assert name != "long" or len(prompt) > 1000
    if (name, sampled) not in expected:
        expected[name, sampled] = reference.generate(prompt, 128, settings)
    tokens = list(deployment.generate(prompt, max_tokens=128, ignore_eos=True, sampling=settings))
    assert [t.id for t in tokens] == expected[name, sampled]
    assert tokens[-1].finish_reason == "length"


def test_logprobs_of_the_last_prompt_token_equal_to_the_bit(deployments: Deployments, reference: Unsharded) -> None:
    """The 20,000 largest log probabilities, each of which depends on all 49,152 logits through the normalizer."""
    from shardwise.stage.llama.sampling import log_softmax

    deployment = deployments.of(3)
    prompt = deployment.tokenizer.encode(PROMPTS["long"])
    settings = SamplingSettings(num_logprobs=MAX_LOGPROBS)
    (token,) = deployment.generate(prompt, max_tokens=1, sampling=settings)
    ours = {entry.token: entry.logprob for entry in token.top}
    theirs = log_softmax(reference.prompt_logits(prompt))
    assert len(ours) == MAX_LOGPROBS
    assert all(value == float(theirs[i]) for i, value in ours.items())
    assert min(ours.values()) >= np.delete(theirs, list(ours)).max()
