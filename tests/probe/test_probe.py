"""The probe as people run it: layers through the real backend, links through the real transport, a cluster of workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from shardwise.clock import SystemClock
from shardwise.cluster import LocalEngine, NodeInfo
from shardwise.errors import StageLoadFailed, UsageError
from shardwise.machines import ProfileCache, load_cluster
from shardwise.machines.profile_cache import RateKey
from shardwise.probe import compute, layers, memory, run
from shardwise.probe.cluster import ClusterProbe
from shardwise.probe.folders import OWN_FOLDER
from shardwise.probe.layer_task import LayerTask
from shardwise.probe.link_task import LinkSettings, LinkTarget
from shardwise.probe.links import Echo, LinkProbe
from shardwise.probe.node import NodeReport, NodeSettings, NodeSuite
from shardwise.probe.plausible import Ceilings, why_impossible
from shardwise.probe.statistics import measurement
from shardwise.probe.synthetic import SMALL, write_layers
from shardwise.records import replace
from shardwise.transport.relay import TcpRelay
from shardwise.transport.security import AllowList, Authenticator, NodeKeys
from shardwise.transport.shaping import LinkShape

CLOCK = SystemClock()
FAST = LinkSettings(ping_s=0.2, ping_every_s=0.005, sparse_s=0.0, bulk_s=0.2, loaded_s=0.0)


def test_one_real_layer_takes_time_and_more_rows_take_more() -> None:
    table = layers.synthetic_rates("Q8_0", threads=1, budget_s=0.5, fixed_s=None, clock=CLOCK)
    assert table.library.startswith("llama.cpp")
    assert [t.rows for t in table.timings][:4] == [1, 2, 4, 8]
    assert table.timings[3].layer_s.value > table.timings[0].layer_s.value > 0
    assert 0.1e9 < table.weight_bytes_per_s.value < 1e13


def test_a_broken_slice_is_said_with_the_reason(tmp_path: Path) -> None:
    files = write_layers(tmp_path / "x.gguf", SMALL, "Q8_0", 1)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(StageLoadFailed, match="the layer probe ended with"):
        layers.run_task(LayerTask(short=files, long=files, quantization="Q8_0", threads=1, budget_s=0.1))


@dataclass
class Measured:
    """A machine that was measured once, quickly; its rates are in the cache."""

    settings: NodeSettings
    report: NodeReport
    asked: list[str]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder, asked = tmp_path_factory.mktemp("measured"), list[str]()
    settings = NodeSettings(name="desk", quick=True, threads=1, quantizations=("Q8_0",), disk_folder=str(folder))
    settings = replace(settings, cache_folder=str(folder / "rates"))
    return Measured(settings, NodeSuite(settings, CLOCK, lambda what, share: asked.append(what)).run(), asked)


def test_rates_come_from_the_cache_until_asked_for_fresh_ones(measured: Measured) -> None:
    first, asked = measured.report, measured.asked
    second = NodeSuite(measured.settings, CLOCK, lambda what, share: None).run()
    assert first.profile.rates == second.profile.rates
    assert second.took_s < 6
    assert asked[0] == "memory"
    assert asked[-1] == "done"
    assert first.profile.disk_bytes_per_s is not None
    other = RateKey(device="another", quantization="Q8_0", library=first.profile.rates[0].library)
    assert ProfileCache(Path(measured.settings.cache_folder)).get(other) is None


def test_a_figure_that_cannot_be_is_neither_shown_nor_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 rows by the time of one were once printed as 23.5 TFLOP/s of a CPU, and are still in the caches of that time."""
    good = layers.synthetic_rates("Q8_0", threads=1, budget_s=0.2, fixed_s=None, clock=CLOCK)
    wrong = replace(good, compute_flops_per_s=replace(good.compute_flops_per_s, value=1e15))
    found = [wrong, good]
    monkeypatch.setattr(layers, "synthetic_rates", lambda *args, **more: found.pop(0))
    settings = NodeSettings(name="desk", quick=True, threads=1, quantizations=("Q8_0",), cache_folder=str(tmp_path / "rates"))
    settings = replace(settings, disk_folder=str(tmp_path))
    first = NodeSuite(settings, CLOCK, lambda what, share: None).run()
    assert first.profile.rates == ()
    assert any("Q8_0 was left out: no such processor computes" in note for note in first.notes)
    assert NodeSuite(settings, CLOCK, lambda what, share: None).run().profile.rates == (good,)


def test_the_kv_cache_is_read_at_a_rate_that_can_be() -> None:
    table = layers.kv_rates("f16", 2.0, threads=1, budget_s=0.3, clock=CLOCK)
    triad = measurement(memory.triad_samples(32 * 2**20, 1, 0.1, CLOCK), memory.METHOD, CLOCK)
    product = measurement(compute.compute_samples(0.1, CLOCK), compute.METHOD, CLOCK)
    assert why_impossible(table, Ceilings.of_cpu(triad, product)) == ""
    assert table.compute_flops_per_s.value < 4 * product.value


@pytest.mark.parametrize(("delay_s", "bytes_per_s"), [(0.0, None), (0.02, None), (0.0, 4e6)])
def test_a_link_shows_its_injected_delay_and_rate(delay_s: float, bytes_per_s: float | None) -> None:
    keys, peer = NodeKeys.generate(), NodeKeys.generate()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    allowed = AllowList()
    allowed.allow(keys.public, "desk")
    shape = LinkShape(delay_s=delay_s, bytes_per_s=bytes_per_s or 0.0)
    with Authenticator(context, allowed):
        echo = Echo(context, "tcp://127.0.0.1:*", "nas", peer, CLOCK)
        port = int(echo.address.rpartition(":")[2])
        with TcpRelay(("127.0.0.1", port), forth=shape, back=shape) as relay:
            target = LinkTarget(name="nas", address=f"tcp://127.0.0.1:{relay.address[1]}", public=peer.public)
            probe = LinkProbe(context, "desk", target, keys, CLOCK)
            report = probe.run(FAST, "ethernet")
            probe.close()
        echo.close()
    context.destroy(0)
    found = report.profile
    assert found.latency_s.value == pytest.approx(delay_s, abs=0.006)
    assert found.latency_s.value >= delay_s
    if bytes_per_s is not None:
        assert found.bytes_per_s.value == pytest.approx(bytes_per_s, rel=0.15)
    assert report.round_trip_s.p50 <= report.round_trip_s.p95 <= report.round_trip_s.p99
    assert report.lost_pings == 0


def test_a_cluster_of_two_is_measured_and_its_file_read_back(tmp_path: Path) -> None:
    """Each machine keeps its figures in its own cache folder: the driver's path may not be one there."""
    engine = LocalEngine({name: ("env", f"SHARDWISE_CACHE={tmp_path / name}") for name in ("desk", "nas")})
    infos = [NodeInfo(name="desk", address="127.0.0.1"), NodeInfo(name="nas", address="127.0.0.1")]
    settings = NodeSettings(name="", quick=True, threads=1, quantizations=("Q8_0",))
    settings = replace(settings, disk_folder=OWN_FOLDER, cache_folder=OWN_FOLDER)
    try:
        report = ClusterProbe(engine, "127.0.0.1", settings, FAST, nodes=infos).run()
        assert engine.statuses() == []
    finally:
        engine.close()
    assert report.failed == ()
    assert [n.profile.name for n in report.nodes] == ["desk", "nas"]
    assert all(len(list((tmp_path / name / "rates").iterdir())) == 1 for name in ("desk", "nas"))
    assert sorted((link.profile.source, link.profile.target) for link in report.links) == [("desk", "nas"), ("nas", "desk")]
    run.write(report, tmp_path / "cluster.toml")
    assert load_cluster(tmp_path / "cluster.toml") == report.cluster()


def test_a_worker_that_dies_is_named_and_the_others_go_on(measured: Measured) -> None:
    engine = LocalEngine({"desk": (), "nas": ("sh", "-c", "echo no such luck >&2; exit 3", "--")})
    infos = [NodeInfo(name="desk", address="127.0.0.1"), NodeInfo(name="nas", address="127.0.0.1")]
    try:
        report = ClusterProbe(engine, "127.0.0.1", replace(measured.settings, name=""), FAST, nodes=infos).run()
    finally:
        engine.close()
    assert report.failed == ("nas: its worker ended: no such luck",)
    assert [n.profile.name for n in report.nodes] == ["desk"]


def test_the_command_writes_a_file_and_one_document(tmp_path: Path) -> None:
    env = os.environ | {"SHARDWISE_STATE": str(tmp_path / "state"), "SHARDWISE_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "shardwise.cli", "--json", "probe", "--quick", "--threads", "1", "--quantization", "q8_0"]
    out = tmp_path / "cluster.toml"
    done = subprocess.run([*command, "--out", str(out), "--name", "desk"], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["nodes"][0]["name"] == "desk"
    cluster = load_cluster(out)
    assert cluster.node("desk").memory_bytes == document["cluster"]["nodes"][0]["memory_bytes"]
    assert cluster.node("desk").rates[0].quantization == "Q8_0"


@pytest.mark.bench
@pytest.mark.parametrize(("options", "at_most_s"), [(["--quick"], 10.0), ([], 60.0)])
def test_a_probe_of_an_empty_cache_is_quick(tmp_path: Path, options: list[str], at_most_s: float) -> None:
    env = os.environ | {"SHARDWISE_STATE": str(tmp_path / "state"), "SHARDWISE_CACHE": str(tmp_path / "cache")}
    env = {name: value for name, value in env.items() if not name.startswith("OPENBLAS")}
    started_s = CLOCK.now_s()
    done = subprocess.run([sys.executable, "-m", "shardwise.cli", "probe", *options], env=env, capture_output=True, timeout=120)
    took_s = CLOCK.now_s() - started_s
    print(f"probe {' '.join(options)}, cold: {took_s:.1f} s\n{done.stdout.decode()}")
    assert done.returncode == 0, done.stderr.decode()
    assert took_s < at_most_s


def test_a_wrong_quantization_is_refused() -> None:
    with pytest.raises(UsageError, match="no probe for Q9_Z"):
        run.probe(run.ProbeRequest(quantizations=("Q9_Z",)))
