"""What the fault tests share: requests, undisturbed runs to compare with, several sessions at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shardwise.clock import SystemClock
from shardwise.deploy import Deployment
from shardwise.errors import ShardwiseError
from shardwise.session.request import GenerationRequest, Token
from shardwise.transport.messages import SamplingSettings

DEADLINE_S = 150.0
SETTINGS = {"greedy": SamplingSettings(), "sampled": SamplingSettings(temperature=0.9, top_p=0.95, seed=5)}
PROMPTS = {"short": "Once upon a time there was a dog", "long": "The quick brown fox jumps over the lazy dog. " * 40}


def request(
    deployment: Deployment, *, prompt: str = "short", sampling: str = "greedy", num_tokens: int = 40
) -> GenerationRequest:
    """One of the usual requests."""
    return GenerationRequest(
        prompt=tuple(deployment.tokenizer.encode(PROMPTS.get(prompt, prompt))),
        max_tokens=num_tokens,
        sampling=SETTINGS[sampling],
        ignore_eos=True,
    )


class Watched:
    """A running session: its tokens so far, and its end."""

    def __init__(self, deployment: Deployment, wanted: GenerationRequest) -> None:
        self.tokens: list[Token] = []
        self.error: ShardwiseError | None = None
        self._changed = threading.Condition()
        self._over = False
        self.handle = deployment.submit(wanted, self._take)

    def _take(self, event: Token | ShardwiseError) -> None:
        with self._changed:
            if isinstance(event, ShardwiseError):
                self.error, self._over = event, True
            else:
                self.tokens.append(event)
                self._over = bool(event.finish_reason)
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        return self._over

    def wait_changed(self, timeout_s: float) -> None:
        """Until something came, or so long."""
        with self._changed:
            if not self._over:
                self._changed.wait(timeout_s)

    def wait_for(self, num_tokens: int) -> None:
        """Until so many tokens came (or the end)."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.tokens) >= num_tokens or self._over, DEADLINE_S)

    def ids(self) -> list[int]:
        """All token ids, after the end; an error is raised."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._over, DEADLINE_S), f"hangs after {len(self.tokens)} tokens"
        if self.error is not None:
            raise self.error
        return [token.id for token in self.tokens]


def undisturbed(deployment: Deployment, wanted: GenerationRequest) -> list[int]:
    """The token ids of a run in which nothing happens."""
    return [token.id for token in deployment.stream(wanted)]


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Poll something that is only visible from outside, with a deadline."""
    clock = SystemClock()
    end_s = clock.now_s() + DEADLINE_S
    while not condition():
        assert clock.now_s() < end_s, f"{what} did not happen within {DEADLINE_S} s"
        clock.sleep(0.02)
