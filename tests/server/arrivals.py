"""When do a crowd's tokens arrive? `python -m tests.server.arrivals URL SECONDS SEED LONGEST`; prints one JSON document.

As `load`, on bare sockets whose every piece the kernel stamps when it reaches the client's side, whoever runs at that moment.
The server says in each event when the driver handed the token over (`at`, on the clock of both processes).
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import sys
import time
from dataclasses import dataclass

import msgspec

from shardwise.clock import SystemClock

CLOCK = SystemClock()
SO_TIMESTAMPNS = 35  # Linux
_STAMP = struct.Struct("qq")


def offset_s() -> float:
    """The kernel's wall clock minus ours, from the quickest of several looks."""
    looks = []
    for _ in range(50):
        before_s = CLOCK.now_s()
        wall_s = time.clock_gettime(time.CLOCK_REALTIME)
        after_s = CLOCK.now_s()
        looks.append((after_s - before_s, wall_s - (before_s + after_s) / 2))
    return min(looks)[1]


@dataclass
class Stream:
    """One answer as it arrives."""

    connection: socket.socket
    word: str
    ends_after: int
    hangs_up: bool
    offset_s: float
    late_s: list[float]
    done: asyncio.Future[str]
    rest: bytes = b""
    got: int = 0

    def readable(self) -> None:
        """Take what is there; a stamp is of the last piece, so an earlier one in the same read counts as later than it was."""
        data, notes, _, _ = self.connection.recvmsg(65536, 256)
        stamp = next((_STAMP.unpack(note[:16]) for _, kind, note in notes if kind == SO_TIMESTAMPNS), None)
        *events, self.rest = (self.rest + data).split(b"\n\n")
        for event in events:
            _, _, text = event.partition(b"data: ")
            if not text or self.done.done():
                continue
            if text == b"[DONE]":
                self.done.set_result("" if self.got == self.ends_after else f"{self.got} tokens of {self.ends_after}")
                return
            chunk = msgspec.json.decode(text)
            said = chunk["choices"][0]["text"]
            self.got += said.count(self.word)
            if stamp is not None:
                self.late_s.append(stamp[0] + stamp[1] / 1e9 - self.offset_s - chunk["at"])
            if said.replace(self.word, "") or (self.hangs_up and self.got >= self.ends_after):
                self.done.set_result(said.replace(self.word, ""))
        if not data and not self.done.done():
            self.done.set_result(f"ended after {self.got}")


async def one_answer(
    address: tuple[str, int], token: int, word: str, rng: random.Random, longest: int, late_s: list[float]
) -> str:
    """Ask, read or hang up; what was wrong, if anything."""
    loop = asyncio.get_running_loop()
    max_tokens = rng.randint(4, longest)
    hangs_up = rng.random() < 0.2
    fields = {"prompt": f"Say {word}", "max_tokens": max_tokens, "logit_bias": {str(token): 100}, "stream": True}
    body = msgspec.json.encode(fields | {"model": "sample", "temperature": 0})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address[0]}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    with socket.socket() as connection:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        await loop.sock_connect(connection, address)
        await loop.sock_sendall(connection, head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        ends_after = rng.randint(1, max_tokens) if hangs_up else max_tokens
        stream = Stream(connection, word, ends_after, hangs_up, offset_s(), late_s, loop.create_future())
        loop.add_reader(connection, stream.readable)
        try:
            return await stream.done
        finally:
            loop.remove_reader(connection)


async def main(url: str, duration_s: float, seed: int, longest: int, words: list[tuple[int, str]]) -> dict[str, object]:
    """One client a word, for that long; the last requests are finished."""
    host, port = url.removeprefix("http://").split(":")
    until_s = CLOCK.now_s() + duration_s
    late_s: list[float] = []
    problems: list[str] = []

    async def client(index: int, token: int, word: str) -> None:
        rng = random.Random(f"{seed}-{index}")
        while CLOCK.now_s() < until_s:
            if wrong := await one_answer((host, int(port)), token, word, rng, longest, late_s):
                problems.append(wrong)

    async with asyncio.TaskGroup() as group:
        for index, (token, word) in enumerate(words):
            group.create_task(client(index, token, word))
    return {"late_s": late_s, "problems": problems}


if __name__ == "__main__":
    given = [(token, word) for token, word in json.loads(sys.stdin.read())]
    print(json.dumps(asyncio.run(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), given))))
