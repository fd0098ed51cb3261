"""A process group of real processes that runs many cases: starting torch once per rank is what takes the time."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class RankFailed(AssertionError):
    """A case raised on a rank."""


class Ranks:
    """`world` processes; `run("tests.tp.cases:name", ...)` calls the function on all of them and gives the results by rank."""

    def __init__(self, world: int, *, timeout_s: float = 30.0) -> None:
        self.world = world
        self.broken = False
        self._folder = tempfile.TemporaryDirectory(prefix="tp-")
        store = Path(self._folder.name, "store")
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "0",
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.tp.worker", str(rank), str(world), str(store), str(timeout_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env=environment,
                text=True,
            )
            for rank in range(world)
        ]
        for rank in range(world):
            self.read(rank, 120.0)

    def send(self, rank: int, case: str, **arguments: Any) -> None:
        """Start a case on one rank."""
        pipe = self.processes[rank].stdin
        assert pipe is not None
        pipe.write(json.dumps({"case": case, "arguments": arguments}) + "\n")
        pipe.flush()

    def read(self, rank: int, timeout_s: float) -> dict[str, Any]:
        """One answer of a rank, within the deadline."""
        pipe = self.processes[rank].stdout
        assert pipe is not None
        ready, _, _ = select.select([pipe], [], [], timeout_s)
        if not ready:
            raise RankFailed(f"rank {rank} gave no answer within {timeout_s} s")
        line = pipe.readline()
        if not line:
            raise RankFailed(f"rank {rank} ended with {self.processes[rank].wait(10)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, case: str, *, timeout_s: float = 240.0, **arguments: Any) -> list[Any]:
        """The case's result on every rank; RankFailed with the trace where one raised."""
        for rank in range(self.world):
            self.send(rank, case, **arguments)
        deadline = time.monotonic() + timeout_s
        results = []
        for rank in self._in_order_of_answers(deadline):
            answer = self.read(rank, 1.0)
            if "error" in answer:
                self.kill()
                raise RankFailed(f"rank {rank} of {self.world}: {answer['error']}\n{answer['trace']}")
            results.append((rank, answer["result"]))
        return [result for _, result in sorted(results, key=lambda pair: pair[0])]

    def _in_order_of_answers(self, deadline: float) -> Iterator[int]:
        """Ranks as they answer; the first to fail is the one to report."""
        waiting = {process.stdout: rank for rank, process in enumerate(self.processes)}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.kill()
                raise RankFailed(f"ranks {sorted(waiting.values())} gave no answer in time")
            for pipe in ready:
                yield waiting.pop(pipe)

    def kill(self) -> None:
        """End all ranks: after a failure their collectives no longer match."""
        self.broken = True
        for process in self.processes:
            process.kill()

    def end_input(self) -> None:
        """The ranks end by themselves."""
        for process in self.processes:
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()

    def close(self) -> None:
        self.end_input()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
            if process.stdout is not None:
                process.stdout.close()
        self._folder.cleanup()
