"""What being recoverable costs while nothing happens: the journal, the heartbeats, the kept rows."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import psutil
import pytest

from shardwise.clock import SystemClock
from shardwise.deploy import launch_local
from shardwise.session.journal import Generated, Journal
from tests.deploy.faults import request

pytestmark = pytest.mark.bench
NUM_EVENTS = 5000
IDLE_S = 8.0


def test_journal_and_heartbeats_cost_at_most_one_percent(sample_gguf: Path, tmp_path: Path) -> None:
    """The time of an append beside the time of a token; the processor time of idle workers beside the wall's."""
    clock = SystemClock()
    with launch_local(sample_gguf, num_stages=2, context_tokens=512, probe_interval_s=0) as built:
        tokens = list(built.stream(request(built, num_tokens=200)))
        token_s = statistics.median(b.elapsed_s - a.elapsed_s for a, b in itertools.pairwise(tokens))
        workers = [psutil.Process(stage.pid) for stage in built.stages]
        before_s = [sum(worker.cpu_times()[:2]) for worker in workers]
        started_s = clock.now_s()
        while clock.now_s() - started_s < IDLE_S:
            built.driver.wait_changed(IDLE_S - (clock.now_s() - started_s))
        shares = [
            (sum(worker.cpu_times()[:2]) - was_s) / (clock.now_s() - started_s)
            for worker, was_s in zip(workers, before_s, strict=True)
        ]
        kept_bytes = 4 * built.model.hidden_size
    with Journal(tmp_path) as journal:
        started_s = clock.now_s()
        for index in range(NUM_EVENTS):
            journal.append(Generated(session=1, position=index, token=index))
        append_s = (clock.now_s() - started_s) / NUM_EVENTS
    print(f"append {1e6 * append_s:.1f} us, token {1e3 * token_s:.2f} ms: {100 * append_s / token_s:.2f} %")
    print(f"idle workers: {', '.join(f'{100 * share:.2f} %' for share in shares)}; kept {kept_bytes} bytes a token and stage")
    assert append_s / token_s <= 0.01
    assert max(shares) <= 0.01
