"""Whether a running session notices strangers: decode speed of a real ring with and without attacks, interleaved.

    python benchmarks/shards/strangers.py [--rounds 8] [--tokens 48]

Method: a ring of two stages (sample model, loopback, encrypted). In every second round a process of the lowest priority runs
the attacks of `tests/transport/security/strangers.py` against both workers' ports, one after another, without a pause.
Reported: the medians of time a token, their ratio round by round, and the CPU time that the workers spent a token (what the
attack costs *them*; on a machine of two cores the attacker's own computing slows the ring down as well, whatever it computes).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise

import psutil

from shardwise.deploy import launch_local
from shardwise.deploy.deployment import Deployment

PROMPT = "Once upon a time, in a land far away, there lived a"
ATTACKER = """
import contextlib, os, sys
from tests.transport.security.strangers import ATTACKS
if hasattr(os, "nice"):
    os.nice(19)
ports = [int(port) for port in sys.argv[1:]]
count = 0
while True:
    for name, attack in ATTACKS.items():
        for port in ports:
            with contextlib.suppress(AssertionError, OSError):
                assert attack(port) == b"", name
                count += 1
                print(count, flush=True)
"""


def worker_cpu_s(deployment: Deployment) -> float:
    times = [psutil.Process(stage.pid).cpu_times() for stage in deployment.stages]
    return sum(t.user + t.system for t in times)


def measure(deployment: Deployment, num_tokens: int) -> tuple[float, float]:
    """Median seconds and mean worker CPU seconds a token."""
    cpu_s, arrivals = worker_cpu_s(deployment), []
    for _ in deployment.generate(PROMPT, max_tokens=num_tokens, ignore_eos=True):
        arrivals.append(time.perf_counter())
    return statistics.median(b - a for a, b in pairwise(arrivals[1:])), (worker_cpu_s(deployment) - cpu_s) / num_tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    arguments = parser.parse_args()
    quiet, attacked, attacks = [], [], 0
    with launch_local("sample", num_stages=2, context_tokens=512, max_sessions=1, probe_interval_s=0.0) as deployment:
        ports = [stage.address.rsplit(":", 1)[1] for stage in deployment.stages]
        measure(deployment, 16)
        for _ in range(arguments.rounds):
            quiet.append(measure(deployment, arguments.tokens))
            with subprocess.Popen([sys.executable, "-c", ATTACKER, *ports], stdout=subprocess.PIPE) as attacker:
                assert attacker.stdout is not None
                attacker.stdout.readline()
                attacked.append(measure(deployment, arguments.tokens))
                attacker.kill()
                attacks += len(attacker.stdout.read().split())
    ratios = [b[0] / a[0] for a, b in zip(quiet, attacked, strict=True)]
    result = {
        "attacks": attacks,
        "quiet_tokens_per_s": 1 / statistics.median(a for a, _ in quiet),
        "attacked_tokens_per_s": 1 / statistics.median(a for a, _ in attacked),
        "median_ratio_of_time": statistics.median(ratios),
        "worker_cpu_s_per_token": {
            "quiet": statistics.median(c for _, c in quiet),
            "attacked": statistics.median(c for _, c in attacked),
        },
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
