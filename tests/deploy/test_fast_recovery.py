"""Fast recovery: everything is fed again in chunks. How many sessions diverge, and how close the two best tokens were there."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest

from shardwise.deploy import launch_local
from shardwise.records import replace
from shardwise.session.recovery import RecoveryPolicy
from shardwise.session.request import Token
from shardwise.transport.messages import SamplingSettings
from tests.deploy.faults import Watched, eventually, request

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]
TEXTS = (
    "Once upon a time there was a dog",
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils at one hundred degrees because",
    "Dear Sir or Madam, I am writing to",
    "The three laws of motion are",
)
AT_TOKEN, NUM_TOKENS = 60, 140  # below 32 rows a chunk gives the same bits as single rows: BLAS is not used


def test_the_share_that_diverges_is_reported(sample_gguf: Path) -> None:
    policy = RecoveryPolicy(recovery="fast")
    margins: list[float] = []
    with launch_local(sample_gguf, num_stages=2, context_tokens=512, deterministic=True, recovery=policy) as built:
        for number, text in enumerate(TEXTS):
            wanted = replace(request(built, prompt=text, num_tokens=NUM_TOKENS), sampling=SamplingSettings(num_logprobs=2))
            undisturbed = list(built.stream(wanted))
            session = Watched(built, wanted)
            session.wait_for(AT_TOKEN)
            os.kill(built.stages[number % 2].pid, signal.SIGKILL)
            got = session.ids()
            assert len(got) == NUM_TOKENS
            assert got[:AT_TOKEN] == [t.id for t in undisturbed[:AT_TOKEN]]
            assert built.recoveries[-1].grade == "fast", built.recoveries[-1]
            differs = [a for a, b in zip(undisturbed, got, strict=True) if a.id != b]
            if differs:
                margins.append(margin(differs[0]))
                print(f"  {text!r}: differs from token {differs[0].position - len(wanted.prompt)}, margin {margins[-1]:.3f}")
            eventually(lambda: built.driver.connected and not built.driver.recovering, "standing again")
    print(f"fast recovery: {len(margins)} of {len(TEXTS)} sessions diverge; margins {[round(m, 3) for m in margins]}")
    assert all(one < 2.0 for one in margins), "tokens that were not close to begin with cannot change places"


def margin(token: Token) -> float:
    """By how much the best candidate's log-probability led the second's."""
    first, second = itertools.islice(sorted((c.logprob for c in token.top), reverse=True), 2)
    return first - second
