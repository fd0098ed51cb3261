"""Several sessions at once on real stage processes: independence, cancellation in every phase, KV freed, memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardwise.clock import SystemClock
from shardwise.deploy import Deployment, launch_local
from shardwise.errors import ContextFull, QueueFull, ShardwiseError, UsageError
from shardwise.session.request import GenerationRequest, Token
from shardwise.transport.messages import SamplingSettings

DEADLINE_S = 90.0


@pytest.fixture(scope="module")
def deployment(sample_gguf: Path) -> Iterator[Deployment]:
    with launch_local(sample_gguf, num_stages=2, context_tokens=768, max_sessions=4, max_queue=3) as built:
        yield built


class Collector:
    """The events of one session."""

    def __init__(self) -> None:
        self.events: list[Token | ShardwiseError] = []
        self.done = threading.Event()
        self._arrived = threading.Condition()

    def __call__(self, event: Token | ShardwiseError) -> None:
        with self._arrived:
            self.events.append(event)
            self._arrived.notify_all()
        if isinstance(event, ShardwiseError) or event.finish_reason:
            self.done.set()

    def wait_for(self, count: int) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.events) >= count, DEADLINE_S)

    def ids(self) -> list[int]:
        assert self.done.wait(DEADLINE_S)
        errors = [e for e in self.events if isinstance(e, ShardwiseError)]
        assert not errors, errors
        return [e.id for e in self.events if isinstance(e, Token)]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll something that is only visible from outside, with a deadline."""
    clock = SystemClock()
    end_s = clock.now_s() + DEADLINE_S
    while not condition():
        assert clock.now_s() < end_s, f"{what} did not happen within {DEADLINE_S} s"
        clock.sleep(0.02)


def kv_is_free(deployment: Deployment) -> bool:
    return all(s.sessions == 0 and s.kv_tokens == 0 for s in deployment.stats())


def request(
    deployment: Deployment, text: str, max_tokens: int = 24, seed: int = 0, temperature: float = 0.0
) -> GenerationRequest:
    return GenerationRequest(
        prompt=tuple(deployment.tokenizer.encode(text)),
        max_tokens=max_tokens,
        sampling=SamplingSettings(seed=seed, temperature=temperature),
        ignore_eos=True,
    )


TEXTS = ["Once upon a time", "The capital of France is", "def main():", "Water boils at " * 30]


def test_streams_are_not_mixed(deployment: Deployment) -> None:
    """Four at once: every session's events are its own, in order, each position once."""
    collectors = [Collector() for _ in TEXTS]
    for text, collector in zip(TEXTS, collectors, strict=True):
        deployment.submit(request(deployment, text), collector)
    for text, collector in zip(TEXTS, collectors, strict=True):
        assert len(collector.ids()) == 24
        positions = [e.position for e in collector.events if isinstance(e, Token)]
        start = len(deployment.tokenizer.encode(text))
        assert positions == list(range(start, start + 24))
    wait_until(lambda: kv_is_free(deployment), "freeing the KV")


def test_deterministic_tokens_do_not_depend_on_company(sample_gguf: Path) -> None:
    """Alone or among four, greedy and sampled: the same ids."""
    with launch_local(sample_gguf, num_stages=2, context_tokens=768, max_sessions=4, deterministic=True) as built:
        cases = [request(built, text, 40, seed=i, temperature=0.8 * (i % 2)) for i, text in enumerate(TEXTS)]
        alone = [[t.id for t in built.stream(case)] for case in cases]
        collectors = [Collector() for _ in cases]
        for case, collector in zip(cases, collectors, strict=True):
            built.submit(case, collector)
        assert [c.ids() for c in collectors] == alone


@pytest.mark.parametrize("after", [0, 1, 5])
def test_cancel_frees_the_kv_in_every_phase(deployment: Deployment, after: int) -> None:
    """Before the first token (during prefill), after it, and in the middle."""
    collector = Collector()
    handle = deployment.submit(request(deployment, "word " * 600 if after == 0 else "Hello", 100), collector)
    if after:
        collector.wait_for(after)
    handle.cancel()
    assert collector.done.wait(DEADLINE_S)
    last = collector.events[-1]
    assert isinstance(last, Token)
    assert last.finish_reason == "cancelled"
    wait_until(lambda: kv_is_free(deployment), "freeing the KV")
    handle.cancel()  # again, harmless
    assert len(list(deployment.generate("Hello", max_tokens=3, ignore_eos=True))) == 3


def test_leaving_the_loop_frees_the_session(deployment: Deployment) -> None:
    stream = deployment.generate("Once upon a time", max_tokens=200, ignore_eos=True)
    assert len(list(itertools.islice(stream, 3))) == 3
    stream.close()  # type: ignore[attr-defined]
    wait_until(lambda: kv_is_free(deployment), "freeing the KV")


def test_requests_beyond_the_slots_wait_and_beyond_the_queue_are_refused(deployment: Deployment) -> None:
    collectors = [Collector() for _ in range(7)]
    handles = [deployment.submit(request(deployment, "Hello", 60), c) for c in collectors[:4]]
    wait_until(lambda: len(deployment.driver.open_sessions) == 4, "opening four sessions")
    handles += [deployment.submit(request(deployment, "Hello", 60), c) for c in collectors[4:]]
    wait_until(lambda: len(deployment.driver.waiting) == 3, "three waiting")
    with pytest.raises(QueueFull):
        deployment.submit(request(deployment, "Hello"), Collector())
    handles[5].cancel()  # one that still waits
    for index, collector in enumerate(collectors):
        assert collector.done.wait(DEADLINE_S)
        last = collector.events[-1]
        assert isinstance(last, Token)
        assert last.finish_reason == ("cancelled" if index == 5 else "length")
    wait_until(lambda: kv_is_free(deployment), "freeing the KV")


def test_context_end_and_bad_requests(deployment: Deployment) -> None:
    long = [5] * 760
    tokens = list(deployment.generate(long, max_tokens=100, ignore_eos=True))
    assert tokens[-1].finish_reason == "length"
    assert tokens[-1].position == 767
    with pytest.raises(ContextFull, match="768"):
        deployment.generate([5] * 768)
    with pytest.raises(UsageError, match="empty"):
        deployment.generate([])
    with pytest.raises(UsageError, match="max_tokens"):
        deployment.generate("x", max_tokens=0)
    with pytest.raises(UsageError, match="outside"):
        deployment.generate([10**6])
    with pytest.raises(UsageError, match="GBNF"):
        list(deployment.generate("x", sampling=SamplingSettings(grammar="root ::= (")))
    for grammar, words in (("#" * 2**20 + "\n", "1048577 bytes"), ("\ud800", "Unicode")):
        with pytest.raises(UsageError, match=words):
            deployment.generate("x", sampling=SamplingSettings(grammar=grammar))
    wait_until(lambda: kv_is_free(deployment), "freeing the KV")


def test_a_grammar_that_is_longer_than_a_frame(deployment: Deployment) -> None:
    """And its session's neighbours: a frame beyond the limit would end the connection, for everybody."""
    rule = "root ::= [0-9]+ "
    found = [
        [token.id for token in deployment.generate("One, two,", max_tokens=8, sampling=SamplingSettings(grammar=grammar))]
        for grammar in (rule, rule + "#" + "x" * (2**20 - len(rule) - 1))
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 8


def test_stop_strings_end_the_session(deployment: Deployment) -> None:
    whole = "".join(t.text for t in deployment.generate("The capital of France is", max_tokens=24, ignore_eos=True))
    stop = whole[7:12]
    tokens = list(deployment.generate("The capital of France is", max_tokens=24, ignore_eos=True, stop=(stop,)))
    assert "".join(t.text for t in tokens) == whole[: whole.index(stop)]
    assert tokens[-1].finish_reason == "stop"
    wait_until(lambda: kv_is_free(deployment), "freeing the KV")


def test_workers_keep_to_their_memory(deployment: Deployment) -> None:
    """Peak resident memory <= slice + KV + 150 MiB."""
    for status, figures in zip(deployment.stages, deployment.stats(), strict=True):
        assert figures.peak_memory_bytes <= status.weight_bytes + status.kv_bytes + 150 * 2**20


def test_a_trace_accounts_for_every_stage(deployment: Deployment) -> None:
    tokens = list(deployment.generate("Hello there", max_tokens=5, ignore_eos=True, traced=True))
    for token in tokens:
        assert [v.stage for v in token.visits] == [0, 1]
        assert all(v.received_s <= v.started_s <= v.computed_s <= v.sent_s for v in token.visits)


def test_figures_of_the_stages(deployment: Deployment) -> None:
    deployment.stats(reset=True)
    list(deployment.generate("Hello there", max_tokens=11, ignore_eos=True))
    first, last = deployment.stats()
    assert first.decode_rows == last.decode_rows == 10
    assert first.decode.p50 > 0
    assert last.transfer.p50 > 0
    hidden_bytes = deployment.model.hidden_size * 4
    assert hidden_bytes < first.decode_sent_bytes / first.decode_steps_sent < hidden_bytes + 200
