"""Streaming clients in a process of their own: `python -m tests.server.load URL SECONDS SEED LONGEST`; prints one JSON document.

Each client is told by `logit_bias` to say one word of its own, so a mixed stream shows, and it counts its tokens, so a lost one
does. Some hang up in the middle.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit

import msgspec

from shardwise.clock import SystemClock

CLOCK = SystemClock()


@dataclass
class Totals:
    """What all clients saw."""

    requests: int = 0
    tokens: int = 0
    cancelled: int = 0
    refused: int = 0
    wall_s: float = 0.0
    problems: list[str] = field(default_factory=list)


@dataclass
class Crowd:
    """What the clients share."""

    host: str
    port: int
    until_s: float
    seed: int
    longest: int  # tokens of an answer, at most
    totals: Totals = field(default_factory=Totals)


async def one_request(crowd: Crowd, token: int, word: str, rng: random.Random) -> None:
    totals = crowd.totals
    max_tokens = rng.randint(4, crowd.longest)
    hang_up_after = rng.randint(1, max_tokens) if rng.random() < 0.2 else None
    body = msgspec.json.encode(
        {
            "model": "sample",
            "prompt": f"Say {word}",
            "max_tokens": max_tokens,
            "temperature": 0,
            "logit_bias": {str(token): 100},
            "stream": True,
        }
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {crowd.host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection(crowd.host, crowd.port)
    try:
        writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status = int((await reader.readline()).split()[1])
        if status != 200:
            totals.refused += 1
            if status != 429:
                totals.problems.append(f"status {status}")
            return
        totals.requests += 1
        await read_stream(reader, word, max_tokens, hang_up_after, totals)
    finally:
        writer.close()


async def read_stream(reader: asyncio.StreamReader, word: str, wanted: int, hang_up_after: int | None, totals: Totals) -> None:
    got, reason = 0, None
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            if got != wanted or reason != "length":
                totals.problems.append(f"{got} tokens of {wanted}, ended by {reason}")
            return
        chunk = msgspec.json.decode(line[6:])
        if "error" in chunk:
            totals.problems.append(str(chunk["error"]))
            return
        choice = chunk["choices"][0]
        reason = choice["finish_reason"]
        if choice["text"].replace(word, ""):
            totals.problems.append(f"{choice['text']!r} in the stream of {word!r}")
        got += choice["text"].count(word)
        totals.tokens += choice["text"].count(word)
        if hang_up_after is not None and got >= hang_up_after:
            totals.cancelled += 1
            return
    totals.problems.append(f"the stream ended after {got} of {wanted}")


async def client(crowd: Crowd, index: int, token: int, word: str) -> None:
    rng = random.Random(f"{crowd.seed}-{index}")
    while CLOCK.now_s() < crowd.until_s:
        await one_request(crowd, token, word, rng)


async def main(url: str, duration_s: float, seed: int, longest: int, words: list[tuple[int, str]]) -> Totals:
    """One client a word, for that long; the last requests are finished."""
    parts = urlsplit(url)
    started_s = CLOCK.now_s()
    crowd = Crowd(parts.hostname or "127.0.0.1", parts.port or 80, started_s + duration_s, seed, longest)
    async with asyncio.TaskGroup() as group:
        for index, (token, word) in enumerate(words):
            group.create_task(client(crowd, index, token, word))
    crowd.totals.wall_s = CLOCK.now_s() - started_s
    return crowd.totals


if __name__ == "__main__":
    words = [(token, word) for token, word in json.loads(sys.stdin.read())]
    print(json.dumps(asdict(asyncio.run(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), words)))))
