"""What encryption costs in decode: the same ring on loopback with CURVE and without, interleaved in one run.

    python benchmarks/shards/encryption.py [--stages 3] [--tokens 64] [--rounds 12]

Method: two deployments of the sample model (one encrypted, one not) stand at the same time, idle but for the one that is
measured. Each round decodes the same tokens on both, in an order that alternates; a figure is the median time per token of one
round. Reported: medians over the rounds, and the median of the ratios of each round's pair (robust against drifts of the
machine).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import pairwise

from shardwise.deploy import launch_local
from shardwise.deploy.deployment import Deployment

PROMPT = "Once upon a time, in a land far away, there lived a"


def token_s(deployment: Deployment, num_tokens: int) -> float:
    """Median seconds between two tokens of one generation."""
    arrivals = []
    for _ in deployment.generate(PROMPT, max_tokens=num_tokens, ignore_eos=True):
        arrivals.append(time.perf_counter())
    return statistics.median(b - a for a, b in pairwise(arrivals[1:]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    common = {"num_stages": arguments.stages, "context_tokens": 512, "max_sessions": 1, "probe_interval_s": 0.0}
    plain_s, curve_s = [], []
    with launch_local("sample", encrypt=False, **common) as plain, launch_local("sample", encrypt=True, **common) as curve:
        for deployment in (plain, curve):
            token_s(deployment, 16)
        for number in range(arguments.rounds):
            pair = [(plain, plain_s), (curve, curve_s)]
            for deployment, times in pair if number % 2 else pair[::-1]:
                times.append(token_s(deployment, arguments.tokens))
    ratios = [b / a for a, b in zip(plain_s, curve_s, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    result = {
        "stages": arguments.stages,
        "rounds": arguments.rounds,
        "plain_tokens_per_s": 1 / statistics.median(plain_s),
        "encrypted_tokens_per_s": 1 / statistics.median(curve_s),
        "median_cost": statistics.median(ratios) - 1,
        "cost_quartiles": [quartiles[0] - 1, quartiles[2] - 1],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
