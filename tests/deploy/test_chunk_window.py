"""A chunk that is dropped is acknowledged like one that is computed, or the sender's window closes for good."""

from __future__ import annotations

import queue

from shardwise.deploy.launcher import launch_local
from shardwise.errors import ShardwiseError
from shardwise.session.request import GenerationRequest, Token
from shardwise.transport.messages import SamplingSettings


def test_refused_sessions_do_not_close_the_prefill_window() -> None:
    """Ten prompts whose grammar the last stage refuses (their chunks meet no session there), then one that must be answered."""
    with launch_local("sample", num_stages=2, max_sessions=2, context_tokens=128) as deployment:
        prompt = tuple(deployment.prompt_ids("The quick brown fox jumps over the lazy dog"))
        for grammar in (*["root ::= ("] * 10, ""):
            events: queue.SimpleQueue[Token | ShardwiseError] = queue.SimpleQueue()
            deployment.submit(
                GenerationRequest(prompt=prompt, max_tokens=1, sampling=SamplingSettings(grammar=grammar)), events.put
            )
            event = events.get(timeout=30)
            assert isinstance(event, ShardwiseError) == bool(grammar)
