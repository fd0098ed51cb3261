"""Requests that stall or kill whatever computes them, beside innocent ones, on real stage processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.clock import SystemClock
from shardwise.deploy import Deployment, launch_local
from shardwise.errors import SessionLost
from shardwise.records import replace
from shardwise.session.request import GenerationRequest
from shardwise.session.suspects import MOST_LOSSES
from shardwise.transport.messages import SamplingSettings
from tests.deploy.faults import Watched, eventually, request, undisturbed

ENDLESS = "root ::= ([a-z]{0,40}){0,40}"  # valid, short, and llama.cpp looks for its first token for hours


@pytest.fixture(scope="module")
def deployment(sample_gguf: Path) -> Iterator[Deployment]:
    with launch_local(sample_gguf, num_stages=2, context_tokens=768, max_sessions=4, deterministic=True) as built:
        yield built


def poison(deployment: Deployment) -> GenerationRequest:
    return replace(request(deployment), sampling=SamplingSettings(temperature=1.0, grammar=ENDLESS))


@pytest.mark.soak
@pytest.mark.timeout(280)
def test_a_grammar_without_end_costs_its_own_session_only(deployment: Deployment) -> None:
    """One innocent is in the middle of its sentence, one has just begun, one comes while the stages are stuck."""
    wanted = [request(deployment, num_tokens=n, sampling="sampled") for n in (500, 40, 40)]
    expected = [undisturbed(deployment, one) for one in wanted]
    running = [Watched(deployment, wanted[0])]
    running[0].wait_for(5)
    guilty = Watched(deployment, poison(deployment))
    running += [Watched(deployment, one) for one in wanted[1:]]
    with pytest.raises(SessionLost, match=f"lost {MOST_LOSSES} times") as caught:
        guilty.ids()
    assert f"session {guilty.handle.number}" in str(caught.value)
    assert [one.ids() for one in running] == expected
    eventually(lambda: all(s.sessions == 0 for s in deployment.stats()), "free slots")
    assert undisturbed(deployment, wanted[1]) == expected[1]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_session_that_kills_its_stage_ends_and_the_others_do_not(deployment: Deployment) -> None:
    """The stage is killed whenever the guilty session is under way: what a bug in a library would look like."""
    innocent = request(deployment, num_tokens=200, sampling="sampled")
    expected = undisturbed(deployment, innocent)
    driver, clock = deployment.driver, SystemClock()
    long = tuple(deployment.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 60))
    running = Watched(deployment, innocent)
    running.wait_for(2)
    guilty = Watched(deployment, replace(request(deployment), prompt=long))
    killed: set[int] = set()
    while not guilty.over:
        pid = deployment.stages[1].pid
        if driver.restoring.suspects.is_under_way(guilty.handle.number) and driver.connected and pid not in killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        clock.sleep(0.002)
    with pytest.raises(SessionLost, match=r"lost 3 times .* crashed: worker ended with signal 9"):
        guilty.ids()
    assert guilty.tokens == []
    assert MOST_LOSSES <= len(killed) <= MOST_LOSSES + 1
    assert running.ids() == expected
    assert undisturbed(deployment, innocent) == expected
