"""Stateless sampling: a draw depends on (seed, position) and the history only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.errors import UsageError
from shardwise.stage.llama import library
from shardwise.stage.llama.sampling import Sampler, best_ids, log_softmax, mix
from shardwise.stage.llama.vocabulary import Vocabulary
from shardwise.transport.messages import SamplingSettings

Vocab = tuple[Callable[[], Any], int]


@pytest.fixture(scope="module")
def vocab(sample_gguf: Path) -> Vocab:
    found = Vocabulary(str(sample_gguf))
    return lambda: found.handle, int(library.load().llama_vocab_n_tokens(found.handle))


def logits(vocab_size: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(size=vocab_size).astype(np.float32) * 3


def test_greedy_takes_the_lowest_id_on_ties(vocab: Vocab) -> None:
    flat = np.zeros(vocab[1], dtype=np.float32)
    flat[[500, 77, 900]] = 1.0
    assert Sampler(SamplingSettings(), *vocab).choose(flat, [1], 1).token == 77


def test_the_draw_depends_on_seed_and_position_only(vocab: Vocab) -> None:
    settings = SamplingSettings(temperature=1.0, seed=3)
    values = logits(vocab[1])
    a, b = Sampler(settings, *vocab), Sampler(settings, *vocab)
    forward = [a.choose(values, [1, 2], p).token for p in range(30)]
    backward = [b.choose(values, [1, 2], p).token for p in reversed(range(30))][::-1]
    assert forward == backward
    assert len(set(forward)) > 5
    other = [Sampler(SamplingSettings(temperature=1.0, seed=4), *vocab).choose(values, [1, 2], p).token for p in range(30)]
    assert other != forward


def test_draws_follow_the_distribution(vocab: Vocab) -> None:
    values = np.full(vocab[1], -100.0, dtype=np.float32)
    values[[10, 20]] = np.log([0.8, 0.2])
    sampler = Sampler(SamplingSettings(temperature=1.0, seed=1), *vocab)
    share = np.mean([sampler.choose(values, [1], p).token == 10 for p in range(2000)])
    assert abs(share - 0.8) < 0.04  # four standard deviations of 2,000 draws: 0.036


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        (SamplingSettings(temperature=1.0, top_k=2), {3, 4}),
        (SamplingSettings(temperature=1.0, top_p=0.5), {4}),
        (SamplingSettings(temperature=1.0, min_p=0.9), {4}),
        (SamplingSettings(temperature=0.0, logit_bias=((9, 50.0),)), {9}),
        (SamplingSettings(temperature=0.0, presence_penalty=50.0), {3}),
        (SamplingSettings(temperature=0.0, repetition_penalty=50.0), {3}),
        (SamplingSettings(temperature=0.0, frequency_penalty=50.0), {3}),
    ],
)
def test_each_setting_does_what_it_says(vocab: Vocab, settings: SamplingSettings, allowed: set[int]) -> None:
    values = np.full(vocab[1], -20.0, dtype=np.float32)
    values[[2, 3, 4]] = [1.0, 2.0, 4.0]
    sampler = Sampler(settings, *vocab)
    assert {sampler.choose(values, [1, 4], p).token for p in range(40)} <= allowed


def test_a_grammar_is_followed_and_rebuilt_from_what_was_generated(vocab: Vocab) -> None:
    settings = SamplingSettings(grammar='root ::= "yes" | "no"', temperature=1.0, seed=5)
    values = logits(vocab[1], 2)
    whole = Sampler(settings, *vocab)
    history = [1]
    for position in range(1, 4):
        rebuilt = Sampler(settings, *vocab, tuple(history[1:]))
        token = whole.choose(values, history, position).token
        assert rebuilt.choose(values, history, position).token == token
        rebuilt.close()
        history.append(token)
    whole.close()


def test_a_broken_grammar_is_a_usage_error(vocab: Vocab) -> None:
    with pytest.raises(UsageError, match="GBNF"):
        Sampler(SamplingSettings(grammar="root ::= ("), *vocab)


def test_logprobs(vocab: Vocab) -> None:
    values = logits(vocab[1])
    choice = Sampler(SamplingSettings(num_logprobs=3), *vocab).choose(values, [1], 1)
    exact = values.astype(np.float64) - np.log(np.exp(values.astype(np.float64)).sum())
    assert choice.logprob == pytest.approx(exact.max(), abs=1e-5)
    assert [t.token for t in choice.top] == list(np.argsort(-values, kind="stable")[:3])
    assert log_softmax(values).sum() == pytest.approx(exact.sum(), rel=1e-5)


def test_best_ids_among_equals() -> None:
    assert best_ids(np.array([1.0, 3.0, 3.0, 2.0, 3.0], dtype=np.float32), 2) == [1, 2]
    assert best_ids(np.array([1.0, 2.0], dtype=np.float32), 0) == []


def test_mix_spreads() -> None:
    assert len({mix(s, p) for s in range(50) for p in range(50)}) == 2500
