"""A stranger gets nothing, costs next to nothing, and friends do not notice."""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import pytest
import zmq

from shardwise.transport.security import NodeKeys, secure_client
from tests.transport.security.conftest import ask
from tests.transport.security.strangers import ATTACKS, wrong_keys

MAX_COST_BYTES = 10**6
MAX_COST_S = 1.0


@dataclass
class Echo:
    """The server process, and a friend that is connected to it."""

    process: psutil.Process
    port: int
    public: str
    friend: zmq.Socket[bytes]

    def memory_bytes(self) -> int:
        return int(self.process.memory_info().rss)

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


@pytest.fixture
def echo(context: zmq.Context) -> Iterator[Echo]:
    friend = NodeKeys.generate()
    command = [sys.executable, "-m", "tests.transport.security.echo_process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(friend.public + "\n")
        child.stdin.flush()
        port, public = child.stdout.readline().split()
        with context.socket(zmq.DEALER) as socket:
            secure_client(socket, friend, public)
            socket.connect(f"tcp://127.0.0.1:{port}")
            for _ in range(50):
                ask(socket, b"warm up")
            yield Echo(psutil.Process(child.pid), int(port), public, socket)
        child.stdin.close()
        child.wait(10)


def measure(echo: Echo, attack: Callable[[], bytes]) -> None:
    """The first round warms allocators and caches up; the second is what each further stranger costs at its peak."""
    attack()
    memory, cpu, peak = echo.memory_bytes(), echo.cpu_s(), 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, echo.memory_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert attack() == b""
    finally:
        done.set()
        watcher.join()
    assert peak - memory < MAX_COST_BYTES
    assert echo.cpu_s() - cpu < MAX_COST_S
    assert ask(echo.friend, b"still there") == b"still there"


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_a_stranger_gets_and_costs_nothing(echo: Echo, name: str) -> None:
    measure(echo, lambda: ATTACKS[name](echo.port))


def test_wrong_keys_get_and_cost_nothing(echo: Echo) -> None:
    measure(echo, lambda: wrong_keys(echo.port, echo.public))


def median_round_trip_s(echo: Echo, duration_s: float) -> float:
    times = []
    until_s = time.perf_counter() + duration_s
    while time.perf_counter() < until_s:
        started_s = time.perf_counter()
        ask(echo.friend, bytes(2048))
        times.append(time.perf_counter() - started_s)
        time.sleep(0.002)
    return statistics.median(times)


@pytest.mark.bench
def test_friends_keep_their_speed(echo: Echo) -> None:
    """Round trips of an activation's size while all attacks run over and over (on an idle machine)."""
    quiet_s = median_round_trip_s(echo, 3)
    stop = threading.Event()

    def go_on(name: str) -> None:
        while not stop.is_set():
            ATTACKS[name](echo.port)

    threads = [threading.Thread(target=go_on, args=(name,)) for name in ATTACKS]
    for thread in threads:
        thread.start()
    try:
        busy_s = median_round_trip_s(echo, 5)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert busy_s < 2 * quiet_s + 0.001, f"{quiet_s * 1e6:.0f} us became {busy_s * 1e6:.0f} us"
