"""Ray's head, and beside it a thread that tells which raylets it has: the same list that workers are placed by.

    python -m shardwise.cluster.child shardwise.cluster.ray_engine.head HOST:PORT ...    (... = of `ray start`)

A raylet that runs is not yet one where work can be placed: it may wait for a head that ended, or be counted as dead. Only
the head knows. `HeadNews` flow out as lines of standard output, at each change and every `TELL_EVERY_S`.
**Promises** no process more than `ray start --block` has. **Fails when** the head does not answer: that is told, too.
**Called by** `raylet`.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import threading

import msgspec

from shardwise.clock import SystemClock
from shardwise.cluster.ray_engine.settings import LABEL_IDENTITY, LABEL_INCARNATION
from shardwise.records import Record

TELL_EVERY_S = 2.0
_LOOK_EVERY_S = 0.3  # while something changes
_CALM_EVERY_S, _CALM_AFTER_S = 1.0, 10.0
_ANSWER_S = 3.0
_MARK = b"shardwise-head "


class HeadNews(Record):
    """What the head said last."""

    answers: bool = False
    raylets: tuple[tuple[str, int], ...] = ()  # identity and start of each one that it counts as alive, sorted


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(HeadNews)


def news_line(news: HeadNews) -> bytes:
    """The line that tells it."""
    return _MARK + _encoder.encode(news) + b"\n"


def read_news(line: bytes) -> HeadNews | None:
    """What a line tells; None for any other line, and for one that came torn (the next one is whole)."""
    if not line.startswith(_MARK):
        return None
    try:
        return _decoder.decode(line[len(_MARK) :])
    except msgspec.DecodeError:
        return None


class _Watch:
    """Asks the head on and on."""

    def __init__(self, head: str) -> None:
        self._head = head
        self._clock = SystemClock()
        self._told, self._told_s, self._changed_s = HeadNews(), self._clock.now_s(), self._clock.now_s()

    def run(self) -> None:
        while not self._listens():
            self._clock.sleep(_LOOK_EVERY_S)
        from ray._raylet import GcsClient  # type: ignore[attr-defined]
        from ray.exceptions import RayError

        client = None
        while True:
            try:
                if client is None:
                    if not self._listens():
                        raise ConnectionError("nobody listens")  # Ray itself would try for long
                    client = GcsClient(address=self._head)
                nodes = client.get_all_node_info(timeout=_ANSWER_S).values()
                raylets = sorted(_key(node.labels) for node in nodes if node.state == node.ALIVE)
                self._tell(HeadNews(answers=True, raylets=tuple(raylets)))
            except (RayError, OSError, RuntimeError, ValueError):
                client = None
                self._tell(HeadNews())
            calm = self._clock.now_s() - self._changed_s > _CALM_AFTER_S
            self._clock.sleep(_CALM_EVERY_S if calm else _LOOK_EVERY_S)

    def _listens(self) -> bool:
        host, _, port = self._head.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
        except OSError:
            return False
        return True

    def _tell(self, news: HeadNews) -> None:
        now_s = self._clock.now_s()
        if news != self._told:
            self._changed_s = now_s
        if news != self._told or now_s - self._told_s >= TELL_EVERY_S:
            self._told, self._told_s = news, now_s
            os.write(1, news_line(news))


def _key(labels: dict[str, str]) -> tuple[str, int]:
    start = labels.get(LABEL_INCARNATION, "")
    return labels.get(LABEL_IDENTITY, ""), int(start) if start.isdecimal() else 0


def main() -> None:
    """Become `ray start`."""
    watch = _Watch(sys.argv.pop(1))
    threading.Thread(target=watch.run, name="head-watch", daemon=True).start()
    sys.argv[0] = "ray"
    runpy.run_module("ray.scripts.scripts", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
