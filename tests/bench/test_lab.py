"""The virtual home is what it says, and goes away whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardwise.bench.lab import Host, Lab, Link, clean, system
from shardwise.bench.lab.measure import check_delays, check_jitter, check_rates, measure_delays, measure_rate
from shardwise.bench.lab.state import labs
from shardwise.bench.stats import quantile
from shardwise.clock import SystemClock
from shardwise.errors import ConnectFailed, UsageError
from shardwise.transport.shaping import LinkShape
from tests.needs import needs_lab

pytestmark = [pytest.mark.netns, needs_lab]
CLOCK = SystemClock()
_TRAFFIC = [sys.executable, "-m", "shardwise.bench.lab.traffic"]


def _wait_until(condition: object, *, within_s: float) -> bool:
    deadline_s = CLOCK.now_s() + within_s
    while CLOCK.now_s() < deadline_s:
        if condition():  # type: ignore[operator]
            return True
        CLOCK.sleep(0.02)
    return False


@pytest.mark.parametrize("rate_bytes_per_s", [94.1e6 / 8, pytest.param(300e6 / 8, marks=pytest.mark.soak)])
def test_rates_are_true(rate_bytes_per_s: float) -> None:
    """Within 5 %, through the kernel's token bucket and through the relay."""
    checks = check_rates([rate_bytes_per_s])
    assert all(check.ok for check in checks), checks


@pytest.mark.parametrize("delay_s", [0.5e-3, pytest.param(3e-3, marks=pytest.mark.soak), 20e-3])
def test_delays_are_true(delay_s: float) -> None:
    """Within 0.2 ms (median of 200 datagrams)."""
    checks = check_delays([delay_s])
    assert all(check.ok for check in checks), checks


def test_jitter_has_its_distribution() -> None:
    """Of each kind, in a lab of its own; all at once, because they wait between two datagrams most of the time."""
    shapes = [
        LinkShape(delay_s=1e-3, jitter_kind="exponential", jitter_s=2e-3),
        LinkShape(jitter_kind="lognormal", jitter_s=3e-3, jitter_sigma=0.4),
        LinkShape(delay_s=2e-3, jitter_kind="uniform", jitter_s=6e-3),
    ]
    with ThreadPoolExecutor() as threads:
        checks = [*threads.map(lambda shape: check_jitter(shape, num=200), shapes)]
    assert all(check.ok for check in checks), checks


def test_a_single_link_can_be_slower_than_the_others() -> None:
    links = [Link(source="a", target="b", shape=LinkShape(delay_s=3e-3))]
    with Lab(["a", "b", "c"], links) as lab:
        slow = quantile(measure_delays(lab, "a", "b", num=50), 0.5)
        fast = quantile(measure_delays(lab, "a", "c", num=50), 0.5)
        back = quantile(measure_delays(lab, "b", "a", num=50), 0.5)
    assert slow - fast == pytest.approx(3e-3, abs=0.3e-3)
    assert back < 1e-3


def test_links_change_and_cables_are_cut_while_it_runs() -> None:
    with Lab([Host(name="a", relay=True), Host(name="b")]) as lab:
        lab.set_access("a", up=LinkShape(delay_s=5e-3))
        assert quantile(measure_delays(lab, "a", "b", num=30), 0.5) == pytest.approx(5e-3, abs=0.4e-3)
        lab.set_access("a", up=LinkShape())
        sink = lab.popen("b", [*_TRAFFIC, "sink", lab.address("b")], stdout=subprocess.PIPE, text=True)
        port = sink.stdout.readline().strip()
        script = f"import socket; socket.create_connection(('{lab.address('b')}', {port}), timeout=0.3).close()"
        for host in ("a", "b"):
            lab.cut(host)
            with pytest.raises(ConnectFailed):
                lab.call("a", [sys.executable, "-c", script])
            lab.restore(host)
            lab.call("a", [sys.executable, "-c", script.replace("timeout=0.3", "timeout=10")])
        lab.set_access("b", down=LinkShape(bytes_per_s=1e6))
        assert measure_rate(lab, "a", "b", duration_s=1.0) < 1.2e6
        with pytest.raises(UsageError, match="relay=True"):
            lab.set_access("b", up=LinkShape(delay_s=1e-3))


def test_loss_comes_in_bursts_and_dozing_delays_the_first_packet() -> None:
    lossy = LinkShape(loss=0.1, loss_burst_packets=4.0)
    dozy = LinkShape(doze_after_s=0.05, doze_period_s=0.1)
    with Lab([Host(name="a", up=lossy), Host(name="b", down=dozy), "c"]) as lab:
        arrived = len(measure_delays(lab, "a", "c", num=400, every_s=0.002))
        first = measure_delays(lab, "c", "b", num=12, every_s=0.12)
    expected = 400 * (1 - 4 / (4 + 9))  # share of lossy states in the two-state model: burst / (burst + (1 - loss) / loss)
    assert arrived == pytest.approx(expected, abs=60)
    assert max(first) > 0.02
    assert max(first) < 0.11


def test_a_host_with_half_a_core_takes_twice_as_long() -> None:
    spin = (
        "import time\nend = time.process_time() + 0.4\nstart = time.perf_counter()\n"
        "while time.process_time() < end: pass\nprint(time.perf_counter() - start)"
    )
    with Lab([Host(name="slow", cpu_share=0.5)]) as lab:
        took_s = float(lab.call("slow", [sys.executable, "-c", spin]))
    assert took_s > 0.7


def test_background_traffic_fills_the_link_and_ends_with_its_block() -> None:
    shape = LinkShape(bytes_per_s=2e6, queue_bytes=100_000)
    with Lab([Host(name="a", up=shape), Host(name="b")]) as lab:
        with lab.background("a", "b"):
            assert _wait_until(lambda: max(measure_delays(lab, "a", "b", num=10)) > 5e-3, within_s=10)
        assert _wait_until(lambda: max(measure_delays(lab, "a", "b", num=10)) < 5e-3, within_s=10)


def test_two_labs_at_once_do_not_meet() -> None:
    with Lab(["a"]) as one, Lab(["a"]) as two:
        assert one.address("a") != two.address("a")
        assert one.prefix("a") != two.prefix("a")


def test_the_worker_is_the_process_that_was_started() -> None:
    """The prefix replaces itself: process id and signals are the command's own."""
    with Lab([Host(name="a", cpu_share=1.0)]) as lab:
        process = lab.popen("a", [sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE, text=True)
        assert int(process.communicate(timeout=20)[0]) == process.pid


def test_everything_goes_after_an_exception() -> None:
    names: list[str] = []

    def use() -> None:
        with Lab(["a"]) as lab:
            names.append(lab.hosts["a"].netns)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert names
    assert not system.netns_names(names[0])


_OWNER = """
import os, signal, subprocess, sys
from shardwise.bench.lab import Host, Lab
lab = Lab([Host(name="a", relay=True, cpu_share=0.5), "b"])
lab.open()
lab.popen("a", ["sleep", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
if sys.argv[1] == "both":
    os.kill(lab._guard.pid, signal.SIGKILL)
print(lab.hosts["a"].netns, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("who", ["owner", "both"])
def test_everything_goes_after_sigkill(who: str) -> None:
    """The guard takes a lab down when its owner is killed; `clean` when the guard is killed as well."""
    done = subprocess.run([sys.executable, "-c", _OWNER, who], capture_output=True, text=True, timeout=30)
    assert done.returncode == -signal.SIGKILL
    netns = done.stdout.strip()
    number = int(netns.removeprefix("swlab").split("-")[0])
    if who == "both":
        assert system.netns_names(netns)
        assert number in clean()
    assert _wait_until(lambda: not system.netns_names(f"swlab{number}-"), within_s=5)
    assert number not in [state.number for state in labs()]
    leftover = [path for root in {p.parent for p in system.cgroup_dirs("x")} for path in root.glob(f"swlab{number}-*")]
    assert not leftover


def test_bad_plans_are_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        Lab(["a", "a"])
    with pytest.raises(UsageError, match="no host name"):
        Lab(["Not A Name"])
    with pytest.raises(UsageError, match="unknown host"):
        Lab(["a"], [Link(source="a", target="z", shape=LinkShape())])
    with pytest.raises(UsageError, match="ethernet_1g"):
        Host.on("ethernet_1gb", "a")
    with Lab(["a"]) as lab, pytest.raises(UsageError, match="no host 'z'"):
        lab.address("z")
    assert os.getpid()


def test_orders_from_many_threads_are_all_obeyed() -> None:
    """Faults are taken back by timers, several at the same moment."""
    names = ["a", "b", "c", "d"]
    with Lab([Host(name=name, relay=True) for name in names]) as lab:
        for _ in range(20):
            for act in (lab.cut, lab.restore):
                threads = [threading.Thread(target=act, args=(name,), daemon=True) for name in names]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(timeout=10)
                assert not any(thread.is_alive() for thread in threads)
        assert len(measure_delays(lab, "a", "d", num=20)) == 20
