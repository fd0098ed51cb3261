"""Eight sessions at once for five minutes: memory flat after warm-up, KV free at the end, no process left (`make soak`)."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import psutil
import pytest

from shardwise.clock import SystemClock
from shardwise.deploy import Deployment, launch_local
from shardwise.errors import ShardwiseError
from shardwise.session.request import Token

TEXTS = ["Once upon a time", "The capital of France is", "def main():", "word " * 200]


def keep_busy(deployment: Deployment, seed: int, end_s: float, errors: list[BaseException]) -> None:
    """One user: generations of random lengths, a fifth of them left early."""
    draw, clock = random.Random(seed), SystemClock()
    try:
        while clock.now_s() < end_s:
            stream = deployment.generate(
                draw.choice(TEXTS),
                max_tokens=draw.randint(1, 60),
                temperature=draw.choice((0.0, 0.8)),
                seed=seed,
                ignore_eos=True,
            )
            leave_at = draw.randint(1, 20) if draw.random() < 0.2 else 10**6
            last: Token | None = None
            for count, token in enumerate(stream):
                last = token
                if count >= leave_at:
                    break
            assert last is not None
            stream.close()  # type: ignore[attr-defined]
    except (ShardwiseError, AssertionError) as error:
        errors.append(error)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("minutes", [5])
def test_eight_sessions(sample_gguf: Path, minutes: int) -> None:
    clock = SystemClock()
    with launch_local(sample_gguf, num_stages=2, context_tokens=512, max_sessions=8, max_queue=16) as deployment:
        pids = [s.pid for s in deployment.stages]
        errors: list[BaseException] = []
        end_s = clock.now_s() + 60 * minutes
        users = [threading.Thread(target=keep_busy, args=(deployment, n, end_s, errors)) for n in range(8)]
        for user in users:
            user.start()
        warm: list[int] = []
        peak = [0] * len(pids)
        while clock.now_s() < end_s:
            clock.sleep(2.0)  # a sampling interval, not a wait for readiness
            sizes = [psutil.Process(pid).memory_info().rss for pid in pids]
            if not warm and clock.now_s() > end_s - 60 * minutes * 0.8:
                warm = sizes
            peak = [max(a, b) for a, b in zip(peak, sizes, strict=True)]
        for user in users:
            user.join(timeout=60)
        assert not errors, errors[0]
        deadline_s = clock.now_s() + 20
        while any(s.sessions or s.kv_tokens for s in deployment.stats()):
            assert clock.now_s() < deadline_s
            clock.sleep(0.1)
        growth = [b - a for a, b in zip(warm, peak, strict=True)]
        print(f"memory after warm-up {warm}, growth to the peak {growth}")
        assert max(growth) < 8 * 2**20
    assert not any(psutil.pid_exists(pid) for pid in pids)
