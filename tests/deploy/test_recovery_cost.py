"""What being recoverable costs while nothing happens: journal on the disk, heartbeats, watching, kept rows; and checkpoints.

On and off take turns, one deployment at a time, so that whatever else the machine does strikes both.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.clock import SystemClock
from shardwise.cluster.engine import WorkerSpec
from shardwise.cluster.local import LocalEngine
from shardwise.deploy import Deployment, RunOptions, launch
from shardwise.records import replace
from shardwise.session.journal import Generated, Journal
from tests.deploy.faults import request

pytestmark = pytest.mark.bench
NUM_EVENTS = 5000
ROUNDS = int(os.environ.get("SHARDWISE_ROUNDS", "16"))
NUM_TOKENS = 200


class Heartless(LocalEngine):
    """Workers without a heartbeat."""

    def start(self, spec: WorkerSpec) -> None:
        super().start(replace(spec, module="tests.deploy.heartless"))


def token_s(deployment: Deployment) -> tuple[float, float]:
    """Median and mean seconds between two tokens of one run."""
    tokens = list(deployment.stream(request(deployment, num_tokens=NUM_TOKENS)))
    gaps = [b.elapsed_s - a.elapsed_s for a, b in itertools.pairwise(tokens)]
    return statistics.median(gaps), statistics.fmean(gaps)


def launched(model: Path, *, plain: bool = False, **settings: object) -> Deployment:
    """`plain`: no heartbeat, nobody who watches, no kept rows."""
    engine = Heartless() if plain else LocalEngine()
    if plain:
        settings["sent_log_bytes"] = 0
    options = RunOptions(num_stages=2, context_tokens=512, probe_interval_s=0, **settings)  # type: ignore[arg-type]
    built = launch(model, options, engine=engine)
    if plain and built.supervisor is not None:
        built.supervisor.stop()
    return built


def compare(what: str, on: Callable[[], Deployment], off: Callable[[], Deployment]) -> float:
    """Median over all pairs of rounds of how much longer a token takes with it; one deployment at a time."""
    found: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
    for number in range(ROUNDS):
        for name, start in (("on", on), ("off", off))[:: 1 if number % 2 else -1]:
            with start() as deployment:
                found[name].append(min(token_s(deployment) for _ in range(2)))
    median = {name: statistics.median(one for one, _ in runs) for name, runs in found.items()}
    mean = {name: statistics.median(one for _, one in runs) for name, runs in found.items()}
    pairs = sorted(a[0] / b[0] - 1 for a, b in zip(found["on"], found["off"], strict=True))
    print(
        f"\n{what}: {1e3 * median['on']:.3f} ms a token with, {1e3 * median['off']:.3f} ms without:"
        f" {median['on'] / median['off'] - 1:+.2%} (means {mean['on'] / mean['off'] - 1:+.2%}; median of {ROUNDS} pairs"
        f" {statistics.median(pairs):+.2%}, quartiles {pairs[ROUNDS // 4]:+.2%} to {pairs[3 * ROUNDS // 4]:+.2%})"
    )
    return statistics.median(pairs)


def test_journal_and_heartbeats_cost_at_most_one_percent(sample_gguf: Path, tmp_path: Path) -> None:
    """With: journal on the disk, hearts, supervisor, kept rows. Without: none of these."""
    journal = str(tmp_path / "journal")
    cost = compare("recoverable", lambda: launched(sample_gguf, journal_dir=journal), lambda: launched(sample_gguf, plain=True))
    assert cost <= 0.01


def test_checkpoints_every_100_tokens(sample_gguf: Path) -> None:
    """Reported, not limited: whoever asks for them knows."""
    compare(
        "a checkpoint every 100 tokens",
        lambda: launched(sample_gguf, checkpoint_every_tokens=100),
        lambda: launched(sample_gguf),
    )


def test_an_append_takes_microseconds(tmp_path: Path) -> None:
    clock = SystemClock()
    with Journal(tmp_path) as journal:
        started_s = clock.now_s()
        for index in range(NUM_EVENTS):
            journal.append(Generated(session=1, position=index, token=index))
        append_s = (clock.now_s() - started_s) / NUM_EVENTS
    print(f"append {1e6 * append_s:.1f} us")
    assert append_s < 0.001
