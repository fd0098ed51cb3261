"""The ring's goals on one machine, in one run: `python benchmarks/ring/goals.py [rounds]`.

Two stages on loopback beside unsharded llama.cpp, one thread each, interleaved; prints medians and ratios beside the goals. Each
side starts in processes of its own where it is about starting. Needs an idle machine with two cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import numpy as np
from tests.deploy.reference import Unsharded, unsharded

from shardwise.cluster.spawn import UNSET
from shardwise.deploy import Deployment, launch_local
from shardwise.model.resolve import sample_path
from shardwise.session.request import GenerationRequest

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPT = [int(t) for t in np.random.default_rng(3).integers(1000, 40_000, 512)]
NUM_TOKENS = 120
FOR_TWO = (16, 14)  # layers by `plan --users 2` for two such machines: the head, on the last one, is worth several layers
# Each process ends where it is ready: what freeing and an interpreter's end take is no loading.
LOAD_ALONE = """
import os
from tests.deploy.reference import unsharded
from shardwise.model.resolve import sample_path
with unsharded(sample_path(), context_tokens=1024, chunk_tokens=512, quantization="Q4_1"): os._exit(0)
"""
LOAD_ALONE_PACKAGE = f"import llama_cpp{LOAD_ALONE}"  # as whoever uses llama-cpp-python loads it; shardwise takes its C API only
LOAD_SPLIT = """
from shardwise.deploy import launch_local
from shardwise.model.resolve import sample_path
import os
with launch_local(sample_path(), num_stages=2, context_tokens=1024): os._exit(0)
"""


def split_times(deployment: Deployment, prompt: list[int], num_tokens: int) -> tuple[float, float]:
    """(time to first token, mean time between tokens) of one user, seconds."""
    tokens = list(deployment.stream(GenerationRequest(prompt=tuple(prompt), max_tokens=num_tokens, ignore_eos=True)))
    return tokens[0].elapsed_s, (tokens[-1].elapsed_s - tokens[0].elapsed_s) / max(1, len(tokens) - 1)


def alone_times(reference: Unsharded, prompt: list[int], num_tokens: int) -> tuple[float, float]:
    """The same, unsharded."""
    start_s = time.perf_counter()
    token = int(np.argmax(reference.prefill(prompt)))
    first_s = time.perf_counter()
    for _ in range(num_tokens - 1):
        token = int(np.argmax(reference.step(token)))
    return first_s - start_s, (time.perf_counter() - first_s) / max(1, num_tokens - 1)


def two_users(deployment: Deployment) -> float:
    """Tokens per second of two users together, while both generate."""
    times: list[float] = []

    def user(prompt: list[int]) -> None:
        for _ in deployment.stream(GenerationRequest(prompt=tuple(prompt), max_tokens=NUM_TOKENS, ignore_eos=True)):
            times.append(time.perf_counter())

    users = [threading.Thread(target=user, args=(PROMPT[n : n + 32],)) for n in (0, 100)]
    for thread in users:
        thread.start()
    for thread in users:
        thread.join()
    times.sort()
    return (len(times) - 21) / (times[-11] - times[10])


def start_s(code: str) -> float:
    """Wall time of a fresh process that loads and is ready. Its bytecode is cached, as on any machine where it ran before."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, env=environment)
    return time.perf_counter() - started


@contextmanager
def sides(blas: str) -> Iterator[tuple[Deployment, Deployment, Unsharded]]:
    """Equal layers, layers for two users, unsharded."""
    with ExitStack() as stack:
        equal, for_two = (
            stack.enter_context(launch_local(sample_path(), layers=layers, context_tokens=1024, blas=blas, probe_interval_s=0))
            for layers in ((15, 15), FOR_TWO)
        )
        quantization = "Q4_1" if blas == "auto" else "Q4_0"  # the second: ggml's own kernels
        alone = stack.enter_context(unsharded(sample_path(), context_tokens=1024, chunk_tokens=512, quantization=quantization))
        yield equal, for_two, alone


def measure(blas: str, rounds: int) -> None:
    """Decode, first token, two users."""
    with sides(blas) as (split, for_two, alone):
        for deployment in (split, for_two):
            split_times(deployment, PROMPT[:32], 8)
        alone_times(alone, PROMPT[:32], 8)
        rows: list[tuple[float, ...]] = []
        for _ in range(rounds):
            long_split, long_alone = split_times(split, PROMPT, 1)[0], alone_times(alone, PROMPT, 1)[0]
            between_split, between_alone = (
                split_times(split, PROMPT[:32], NUM_TOKENS)[1],
                alone_times(alone, PROMPT[:32], NUM_TOKENS)[1],
            )
            planned = (split_times(for_two, PROMPT[:32], NUM_TOKENS)[1], two_users(for_two))
            rows.append((long_split, long_alone, between_split, between_alone, two_users(split), *planned))
        first_split, first_alone, gap_split, gap_alone, both, planned_gap, planned_both = (
            statistics.median(column) for column in zip(*rows)
        )
        ratios = [statistics.median(r[1] / r[0] for r in rows), statistics.median(r[3] / r[2] for r in rows)]
        users, planned_users = (statistics.median(r[rate] * r[gap] for r in rows) for rate, gap in ((4, 2), (6, 5)))
        memory = [(s.peak_memory_bytes, s.memory_bytes) for s in split.stats()]
    print(f"llama.cpp {'with OpenBLAS' if blas == 'auto' else 'with its own kernels'}, {rounds} rounds:")
    print(f"  decode: {1 / gap_split:.1f} tokens/s, unsharded {1 / gap_alone:.1f}: {ratios[1]:.3f} (goal 0.92)")
    print(f"  first token of 512: {1e3 * first_split:.0f} ms, unsharded {1e3 * first_alone:.0f}: {1 / ratios[0]:.3f} (goal 0.58)")
    print(f"  two users: {both:.1f} tokens/s, one {1 / gap_split:.1f}: {users:.2f} (goal 1.8)")
    print(f"  two users on {FOR_TWO} layers: {planned_both:.1f}, one {1 / planned_gap:.1f}: {planned_users:.2f} (goal 1.8)")
    print(f"  memory of the stages (peak, now), MiB: {[tuple(round(b / 2**20) for b in pair) for pair in memory]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    rounds = parser.parse_args().rounds
    for name in UNSET:  # workers start without; unsharded llama.cpp would take 1.05 s instead of 0.65 for 512 tokens with them
        os.environ.pop(name, None)
    starts = (LOAD_ALONE, LOAD_ALONE_PACKAGE, LOAD_SPLIT)
    times = [[start_s(code) for code in starts] for _ in range(rounds + 1)][1:]  # the first one fills the caches
    alone, package, split = (statistics.median(column) for column in zip(*times))
    print(
        f"ready: {split:.3f} s; unsharded llama.cpp, llama-cpp-python imported as usual, {package:.3f} s: {split / package:.2f}; "
        f"through shardwise's own door {alone:.3f} s: {split / alone:.2f} (goal 1.5)",
        flush=True,
    )
    for blas in ("auto", "off"):  # in this order: what was unloaded does not come back
        measure(blas, rounds)


if __name__ == "__main__":
    main()
