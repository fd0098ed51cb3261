"""What all peer scripts share: reading the job, timing users, writing results. Standard library only."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def read_job() -> dict[str, Any]:
    """The JSON object on standard input."""
    return json.loads(sys.stdin.readline())


def say(record: dict[str, Any]) -> None:
    """One JSON line."""
    print(json.dumps(record), flush=True)


def cut_prompt(text: str, encode: Callable[[str], list[int]], num_tokens: int, user: int) -> list[int]:
    """The prompt of a user: exactly `num_tokens` ids, as shardwise.bench.prompts makes them."""
    start = (user * 97) % len(text)
    rolled = text[start:] + text[:start]
    ids = encode(rolled)
    while len(ids) < num_tokens:
        rolled += rolled
        ids = encode(rolled)
    return ids[:num_tokens]


class UserTimes:
    """When each token of one user arrived, relative to the request's start."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.arrived: list[float] = []
        self.tokens: list[str] = []

    def token(self, token: object) -> None:
        self.arrived.append(time.perf_counter() - self.start)
        self.tokens.append(str(token))

    def record(self) -> dict[str, Any]:
        gaps = [after - before for before, after in zip(self.arrived, self.arrived[1:])]
        digest = hashlib.sha256(",".join(self.tokens).encode()).hexdigest()
        return {"first_s": self.arrived[0], "gaps_s": gaps, "num_tokens": len(self.arrived), "digest": digest}


def at_once(num_users: int, work: Callable[[int, UserTimes], None]) -> list[UserTimes]:
    """Run `work(user, times)` for all users at the same time; the first failure is raised."""
    users = [UserTimes() for _ in range(num_users)]
    with ThreadPoolExecutor(num_users) as pool:
        for done in [pool.submit(work, number, user) for number, user in enumerate(users)]:
            done.result()
    return users


def peak_memory_bytes() -> int:
    """Largest resident set of this process so far (Linux)."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(job: dict[str, Any], run: Callable[[dict[str, Any], int], Iterable[UserTimes]]) -> None:
    """Every load of a job: warm up with a few tokens, then the real thing."""
    for load in job["loads"]:
        for _ in range(job["warm_up"]):
            list(run(load, min(8, load["output_tokens"])))
        users = list(run(load, load["output_tokens"]))
        say({"load": load["name"], "users": [user.record() for user in users], "peak_memory_bytes": peak_memory_bytes()})
