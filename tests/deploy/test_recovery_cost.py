"""What being recoverable costs while nothing happens: journal on the disk, heartbeats, watching, kept rows; and checkpoints.

On and off take turns, so that whatever else the machine does strikes both.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.clock import SystemClock
from shardwise.cluster.engine import WorkerSpec
from shardwise.cluster.local import LocalEngine
from shardwise.cluster.scheduling import scheduling_of
from shardwise.deploy import Deployment, RunOptions, launch
from shardwise.records import replace
from shardwise.session.journal import Generated, Journal
from tests.deploy.faults import request

pytestmark = pytest.mark.bench
NUM_EVENTS = 5000
LAUNCHES = int(os.environ.get("SHARDWISE_LAUNCHES", "6"))
TURNS, NUM_TOKENS = 6, 100
IDLE_S = 10.0


class Heartless(LocalEngine):
    """Workers without a heartbeat."""

    def start(self, spec: WorkerSpec) -> None:
        super().start(replace(spec, module="tests.deploy.heartless"))


def gaps_s(deployment: Deployment) -> list[float]:
    """Seconds between the tokens of one run."""
    tokens = list(deployment.stream(request(deployment, num_tokens=NUM_TOKENS)))
    return [b.elapsed_s - a.elapsed_s for a, b in itertools.pairwise(tokens)]


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
    """How much longer a token takes with it: both stand side by side and take turns of `NUM_TOKENS` tokens. In several launches,
    because two equal deployments differ by some percent for as long as they live; the median over launches of the ratio."""
    ratios: list[float] = []
    for launch_number in range(LAUNCHES):
        found: dict[str, list[float]] = {"on": [], "off": []}
        starts = (("on", on), ("off", off))[:: 1 if launch_number % 2 else -1]
        with contextlib.ExitStack() as open_:
            both = {name: open_.enter_context(start()) for name, start in starts}
            for turn in range(TURNS):
                for name in ("on", "off") if turn % 2 else ("off", "on"):
                    found[name] += gaps_s(both[name])
        with_s, without_s = statistics.median(found["on"]), statistics.median(found["off"])
        ratios.append(with_s / without_s - 1)
        print(f"\n{what}: {1e3 * with_s:.3f} ms a token with, {1e3 * without_s:.3f} ms without: {ratios[-1]:+.2%}")
    print(f"median of {LAUNCHES} launches {statistics.median(ratios):+.2%}")
    return statistics.median(ratios)


def idle_share(deployment: Deployment) -> list[float]:
    """Of a core: each worker and this process, while nothing is generated."""
    clock, pids = deployment.driver.clock, [*(stage.pid for stage in deployment.stages), os.getpid()]
    begun_s, before = clock.now_s(), [scheduling_of(pid).compute_s for pid in pids]
    while clock.now_s() - begun_s < IDLE_S:
        clock.sleep(1.0)
    return [(scheduling_of(pid).compute_s - was_s) / (clock.now_s() - begun_s) for pid, was_s in zip(pids, before, strict=True)]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts processor time finely enough")
def test_beating_and_watching_take_little_of_the_processors(sample_gguf: Path) -> None:
    """An upper bound of what they can cost, free of the noise of a comparison."""
    shares = {}
    for name, plain in (("with", False), ("without", True)):
        with launched(sample_gguf, plain=plain) as built:
            shares[name] = idle_share(built)
    more = [a - b for a, b in zip(shares["with"], shares["without"], strict=True)]
    print("\nof a core, workers and driver:", ", ".join(f"{share:.2%}" for share in more))
    assert max(more[:-1]) <= 0.005
    assert sum(more) <= 0.02


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
