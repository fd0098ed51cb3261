"""Makes hosts compute slower: freezes their cgroups for a share of every 2 ms. `python -m shardwise.bench.lab.slow`.

A quota alone does not make a slow machine: a stage that works 30 % of the time never exhausts half a core, and the
kernel looks at quotas every few milliseconds only. Freezing without regard to what the host is doing makes whatever
it computes take `1 / speed` times as long, as on a slower processor, and leaves the rest of the core to others.

Orders are JSON lines on standard input (`SlowOrder`), each answered with `ok`; the end of input thaws and ends.
**Called by** `Lab`.
"""

from __future__ import annotations

import os
import select
import sys

from shardwise.bench.lab.orders import SlowOrder
from shardwise.bench.lab.system import real_time
from shardwise.clock import SystemClock
from shardwise.records import from_json

PERIOD_S = 2e-3
_CLOCK = SystemClock()


class Brake:
    """All slowed hosts. One timeline: everything freezes at the period's start and thaws after its own share."""

    def __init__(self) -> None:
        self._hosts: dict[str, tuple[int, float]] = {}  # freeze file -> descriptor, speed

    def set_speed(self, freeze_file: str, speed: float) -> None:
        """1 ends the braking."""
        if speed < 1.0 and freeze_file not in self._hosts:
            self._hosts[freeze_file] = (os.open(freeze_file, os.O_WRONLY), speed)
        elif speed < 1.0:
            self._hosts[freeze_file] = (self._hosts[freeze_file][0], speed)
        elif freeze_file in self._hosts:
            fd, _ = self._hosts.pop(freeze_file)
            os.write(fd, b"0")
            os.close(fd)

    def period(self, start_s: float) -> None:
        """Freeze all, thaw each in its turn; returns at the period's end."""
        for fd, _ in self._hosts.values():
            os.write(fd, b"1")
        for fd, speed in sorted(self._hosts.values(), key=lambda host: -host[1]):
            _CLOCK.sleep(start_s + PERIOD_S * (1.0 - speed) - _CLOCK.now_s())
            os.write(fd, b"0")
        _CLOCK.sleep(start_s + PERIOD_S - _CLOCK.now_s())

    @property
    def idle(self) -> bool:
        return not self._hosts

    def release(self) -> None:
        for freeze_file in list(self._hosts):
            self.set_speed(freeze_file, 1.0)


def main() -> None:
    """Obey, and brake in between."""
    real_time()
    brake = Brake()
    print("ready", flush=True)
    start_s = _CLOCK.now_s()
    try:
        while True:
            if select.select([sys.stdin], [], [], None if brake.idle else 0)[0]:
                line = sys.stdin.buffer.readline()
                if not line:
                    return
                order = from_json(line, SlowOrder)
                brake.set_speed(order.freeze_file, order.speed)
                print("ok", flush=True)
            if not brake.idle:
                start_s = max(start_s + PERIOD_S, _CLOCK.now_s() - PERIOD_S)  # never try to catch up on lost time
                brake.period(start_s)
    finally:
        brake.release()


if __name__ == "__main__":
    main()
