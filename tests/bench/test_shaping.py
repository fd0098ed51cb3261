"""Link shapes, fault schedules, and the TCP relay on loopback."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator

import pytest

from shardwise.bench.lab import Host, LoopbackLab, link_preset, link_presets
from shardwise.bench.stats import ks_distance, ks_p_value, quantile
from shardwise.clock import SystemClock
from shardwise.errors import UsageError
from shardwise.transport.faults import Fault, FaultClock, FaultPlan
from shardwise.transport.relay import TcpRelay
from shardwise.transport.shaping import RETRANSMIT_S, LinkModel, LinkShape

CLOCK = SystemClock()


def test_rate_and_delay_add_up() -> None:
    model = LinkModel(LinkShape(bytes_per_s=1000.0, delay_s=0.5))
    assert model.deliver_packet(0.0, 100) == pytest.approx(0.6)
    assert model.deliver_packet(0.0, 100) == pytest.approx(0.7)  # waits for the first to be sent
    assert model.deliver_packet(10.0, 100) == pytest.approx(10.6)


def test_a_full_queue_drops() -> None:
    model = LinkModel(LinkShape(bytes_per_s=1000.0, queue_bytes=500))
    delivered = [model.deliver_packet(0.0, 100) for _ in range(20)]
    assert 5 <= sum(out is not None for out in delivered) <= 7
    assert model.backlog_bytes(0.0) == pytest.approx(500, abs=101)


@pytest.mark.parametrize(("kind", "sigma"), [("uniform", 0.5), ("exponential", 0.5), ("lognormal", 0.8)])
def test_draws_have_the_distribution_they_claim(kind: str, sigma: float) -> None:
    shape = LinkShape(jitter_kind=kind, jitter_s=0.002, jitter_sigma=sigma)  # type: ignore[arg-type]
    model = LinkModel(shape, seed=3)
    draws = [model.jitter_s() for _ in range(2000)]
    assert ks_p_value(ks_distance(draws, shape.jitter_cdf), len(draws)) > 0.01
    for share in (0.1, 0.5, 0.95):
        assert shape.jitter_cdf(shape.jitter_quantile_s(share)) == pytest.approx(share, abs=1e-4)
        assert quantile(draws, share) == pytest.approx(shape.jitter_quantile_s(share), rel=0.15)


def test_packets_never_overtake_and_losses_stall_a_stream() -> None:
    model = LinkModel(LinkShape(jitter_kind="exponential", jitter_s=0.01), seed=1)
    out = [model.deliver_packet(i * 1e-3, 100) or 0.0 for i in range(300)]
    assert out == sorted(out)
    lossy = LinkModel(LinkShape(loss=0.05, loss_burst_packets=2.0), seed=1)
    waits = [lossy.deliver_stream(float(i), 100) - i for i in range(500)]
    stalled = [wait for wait in waits if wait > 0]
    assert 10 <= len(stalled) <= 150
    assert RETRANSMIT_S in [pytest.approx(wait) for wait in stalled]


def test_a_dozing_radio_wakes_on_the_beacon() -> None:
    model = LinkModel(LinkShape(doze_after_s=0.1, doze_period_s=0.25))
    assert model.deliver_packet(10.01, 1) == pytest.approx(10.25)
    assert model.deliver_packet(10.30, 1) == pytest.approx(10.30)  # still awake
    assert model.deliver_packet(10.60, 1) == pytest.approx(10.75)


def test_two_links_in_a_row() -> None:
    both = LinkShape(bytes_per_s=100.0, delay_s=0.1).plus(LinkShape(bytes_per_s=50.0, delay_s=0.2, loss=0.1))
    assert (both.bytes_per_s, both.loss) == (50.0, 0.1)
    assert both.delay_s == pytest.approx(0.3)


@pytest.mark.parametrize("field", ["bytes_per_s", "delay_s", "jitter_s"])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_bad_shapes_are_refused(field: str, value: float) -> None:
    with pytest.raises(UsageError, match=field):
        LinkShape(**{field: value})


def test_every_profile_names_its_source() -> None:
    presets = link_presets()
    assert {"ethernet_10g", "ethernet_1g", "wifi_good", "wifi_busy", "wifi_far", "powerline", "dsl", "lte"} <= set(presets)
    assert all(preset.source and preset.title for preset in presets.values())
    assert link_preset("dsl").up.bytes_per_s < link_preset("dsl").down.bytes_per_s
    with pytest.raises(UsageError, match="did you mean wifi_good"):
        link_preset("wifi_god")


@pytest.fixture
def echo_port() -> Iterator[int]:
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                while data := connection.recv(65536):
                    connection.sendall(data)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(timeout=5)


def _round_trip(address: tuple[str, int], data: bytes) -> tuple[float, bytes]:
    with socket.create_connection(address, timeout=20) as connection:
        start_s = CLOCK.now_s()
        threading.Thread(target=connection.sendall, args=(data,), daemon=True).start()
        back = bytearray()
        while len(back) < len(data):
            back += connection.recv(65536)
        return CLOCK.now_s() - start_s, bytes(back)


def test_the_relay_delays_both_ways_and_keeps_every_byte(echo_port: int) -> None:
    shape = LinkShape(delay_s=0.02)
    with TcpRelay(("127.0.0.1", echo_port), forth=shape, back=shape) as relay:
        took_s, back = _round_trip(relay.address, b"x" * 1000)
        assert 0.04 <= took_s < 0.15
        assert back == b"x" * 1000
        data = bytes(range(256)) * 4000
        assert _round_trip(relay.address, data)[1] == data


def test_the_relay_limits_the_rate(echo_port: int) -> None:
    with TcpRelay(("127.0.0.1", echo_port), forth=LinkShape(bytes_per_s=2e6)) as relay:
        took_s, _ = _round_trip(relay.address, bytes(1_000_000))
    assert 0.47 <= took_s < 0.9


def test_a_home_without_root(echo_port: int) -> None:
    far = LinkShape(delay_s=0.01)
    with LoopbackLab([Host(name="a", up=far), Host(name="b")]) as lab:
        took_s, _ = _round_trip(lab.route("a", "b", echo_port), b"hello")
        assert 0.01 <= took_s < 0.1
        assert lab.route("a", "b", echo_port) == lab.route("a", "b", echo_port)
        assert lab.prefix("a") == []
        with pytest.raises(UsageError, match="no host"):
            lab.route("a", "c", echo_port)


def test_faults_come_due_once() -> None:
    plan = FaultPlan(
        faults=(
            Fault(kind="kill", target="stage-1", at_token=5),
            Fault(kind="cut", target="nas", after_s=2.0, duration_s=1.0),
            Fault(kind="stop", target="nas", in_prefill=True, duration_s=3.0),
        )
    )
    clock = FaultClock(plan)
    assert clock.next_s() == 2.0
    assert [fault.kind for fault in clock.due(elapsed_s=0.1, num_tokens=0, prefilling=True)] == ["stop"]
    assert clock.due(elapsed_s=1.0, num_tokens=4) == []
    assert [fault.kind for fault in clock.due(elapsed_s=2.5, num_tokens=9)] == ["kill", "cut"]
    assert clock.exhausted
    assert plan.faults[1].describe() == "cut nas after 2 s for 1 s"


def test_drawn_plans_repeat_from_their_seed() -> None:
    assert FaultPlan.draw(7, ["a", "b"]) == FaultPlan.draw(7, ["a", "b"])
    assert len({FaultPlan.draw(seed, ["a", "b"]) for seed in range(50)}) > 45


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kind": "kill", "target": "a"}, "when"),
        ({"kind": "kill", "target": "a", "at_token": 1, "after_s": 1.0}, "when"),
        ({"kind": "kill", "at_token": 1}, "target"),
        ({"kind": "stop", "target": "a", "at_token": 1}, "duration_s"),
        ({"kind": "bulk", "target": "a", "at_token": 1, "duration_s": 1.0}, "peer"),
        ({"kind": "slow_node", "target": "a", "at_token": 1, "duration_s": 1.0}, "cpu_share"),
        ({"kind": "roam", "target": "a", "at_token": 1, "duration_s": 1.0}, "shape"),
        ({"kind": "kill", "target": "a", "after_s": math.nan}, "after_s"),
    ],
)
def test_bad_faults_are_refused(fields: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Fault(**fields)  # type: ignore[arg-type]
