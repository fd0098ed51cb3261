"""Three virtual hosts of different memory and speed become one cluster; a client on a fourth gets the unsharded text.

Each host is a network namespace with a raylet of its own. The second half breaks things: see the test names.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.bench.lab import Host, Lab
from shardwise.clock import SystemClock
from shardwise.cluster import lifecycle
from shardwise.deploy import launch_local
from shardwise.machines import load_cluster
from shardwise.server.access import new_key
from tests.cluster.hosts import Hosts
from tests.cluster.waiting import is_gone, wait_until
from tests.needs import needs_lab

pytestmark = [
    pytest.mark.netns,
    pytest.mark.timeout(600),
    needs_lab,
]
PROMPT = "The capital of France is"
GIB = 2**30


class ThreeHosts(Hosts):
    """A lab and what runs on it."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        super().__init__(folder, lab.prefix)
        self.lab = lab
        self.clock = SystemClock()
        self.took_s: dict[str, float] = {}

    def up(self) -> None:
        """`up`, then two `join`s by the pasted lines."""
        started_s = self.clock.now_s()
        first = self.run("desk", "cluster", "up", "--name", "desk")["join"]
        second = self.run("desk", "cluster", "invite")["join"]
        for host, line in (("nas", first), ("pi", second)):
            self.paste(host, line, "--name", host)
        self.took_s["up and join"] = self.clock.now_s() - started_s


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreeHosts]:
    hosts = [
        Host.on("ethernet_1g", "desk", memory_bytes=6 * GIB, relay=True),
        Host.on("ethernet_1g", "nas", memory_bytes=2 * GIB, relay=True),
        Host.on("ethernet_100m", "pi", memory_bytes=2 * GIB, speed=0.5),
        Host.on("ethernet_1g", "client"),
    ]
    with Lab(hosts) as lab:
        home = ThreeHosts(tmp_path_factory.mktemp("three"), lab)
        try:
            home.up()
            yield home
            pids = [pid for host in ("desk", "nas", "pi") for pid in home.pids(host)]
            home.run("desk", "cluster", "down")
            for pid in pids:
                wait_until(lambda pid=pid: is_gone(pid), 20, f"{pid} is gone after down")
        finally:
            home.end()


def test_three_machines_are_one_cluster(home: ThreeHosts) -> None:
    listing = home.run("pi", "cluster", "nodes")
    shown = {n["member"]["name"]: n for n in listing["nodes"]}
    assert set(shown) == {"desk", "nas", "pi"}
    wait_until(lambda: set(home.states().values()) == {"ready"}, 20, "all are ready")
    for name in shown:
        assert shown[name]["card"]["address"] == home.lab.address(name)
    assert shown["nas"]["card"]["memory_bytes"] < 2 * GIB < shown["desk"]["card"]["memory_bytes"] < 6 * GIB


def test_a_client_on_a_fourth_host_gets_the_unsharded_text(home: ThreeHosts) -> None:
    key_file = home.folder / "keys.json"
    key = new_key(key_file, "client")
    address = home.lab.address("desk")
    served_s = home.clock.now_s()
    arguments = ["-m", "shardwise.cli", "serve", "sample", "--nodes", "desk,nas,pi", "--host", address, "--ctx", "512"]
    with home.popen("desk", *arguments, "--api-key-file", str(key_file), stderr=subprocess.PIPE) as server:
        try:
            text = home.python("client", "-m", "tests.cluster.ask", f"http://{address}:8000", key, PROMPT)
            home.took_s["serve to first text"] = home.clock.now_s() - served_s
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=30)
    with launch_local("sample", num_stages=1, context_tokens=512) as alone:
        assert text == "".join(token.text for token in alone.generate(PROMPT, max_tokens=32))
    print({k: round(v, 1) for k, v in home.took_s.items()})


@pytest.mark.soak
def test_probe_finds_the_links_and_advise_reads_its_file(home: ThreeHosts) -> None:
    started_s = home.clock.now_s()
    cluster_file = home.folder / "cluster.toml"
    home.run("desk", "probe", "--quick", "--threads", "1", "--quantization", "Q4_1", "--out", str(cluster_file))
    home.took_s["probe"] = home.clock.now_s() - started_s
    cluster = load_cluster(cluster_file)
    assert sorted(node.name for node in cluster.nodes) == ["desk", "nas", "pi"]
    slow, fast = cluster.link("desk", "pi"), cluster.link("desk", "nas")
    assert slow is not None
    assert fast is not None
    assert slow.bytes_per_s.value * 8 == pytest.approx(94e6, rel=0.1)
    assert fast.bytes_per_s.value > 2 * slow.bytes_per_s.value
    advice = home.run("desk", "advise", "sample", "--cluster", str(cluster_file))
    assert advice["advice"]["headline"]
    assert {rank["node"] for stage in advice["stages"] for rank in stage["ranks"]} <= {"desk", "nas", "pi"}
    print({k: round(v, 1) for k, v in home.took_s.items()})


@pytest.mark.soak
def test_a_cut_host_is_seen_and_comes_back_by_itself(home: ThreeHosts) -> None:
    home.lab.cut("nas")
    wait_until(lambda: home.states()["nas"] == "suspect", 10, "silence is seen")
    home.lab.restore("nas")
    wait_until(lambda: home.states()["nas"] == "ready", 30, "it is back")
    engine_nodes = _engine_nodes(home)
    assert engine_nodes == ["desk", "nas", "pi"]


def _engine_nodes(home: ThreeHosts) -> list[str]:
    """The nodes that Ray has, seen from the desk."""
    code = "from shardwise.cluster.lifecycle import attach\ne = attach()\nprint(*e.nodes())\ne.close()"
    return home.python("desk", "-c", code).split()


@pytest.mark.soak
def test_a_host_that_was_cut_for_long_joins_again(home: ThreeHosts) -> None:
    home.lab.cut("nas")
    wait_until(lambda: home.states()["nas"] == "gone", 30, "it counts as gone")
    wait_until(lambda: _engine_nodes(home) == ["desk", "pi"], 60, "Ray gave it up")
    home.lab.restore("nas")
    wait_until(lambda: home.states()["nas"] == "ready", 90, "it is back")
    assert _engine_nodes(home) == ["desk", "nas", "pi"]  # ready: also for Ray, once


@pytest.mark.soak
def test_a_host_that_changes_its_address_is_the_same_node(home: ThreeHosts) -> None:
    old = home.lab.address("nas")
    new = old.rpartition(".")[0] + ".77"
    for host in ("desk", "pi", "client"):
        home.lab.call(host, ["ip", "neigh", "replace", new, "lladdr", home.lab.hosts["nas"].mac, "dev", "eth0"])
    _readdress(home, old, new)
    try:
        wait_until(lambda: _address(home, "nas") == new, 60, "the new address is known")
        wait_until(lambda: home.states()["nas"] == "ready", 60, "it is ready")
        assert _engine_nodes(home) == ["desk", "nas", "pi"]
    finally:
        _readdress(home, new, old)
    wait_until(lambda: _address(home, "nas") == old and home.states()["nas"] == "ready", 60, "and back")


def _readdress(home: ThreeHosts, old: str, new: str) -> None:
    """What a new DHCP lease does. The old one first: a first address takes the others of its network along."""
    home.lab.call("nas", ["ip", "addr", "del", f"{old}/24", "dev", "eth0"])
    home.lab.call("nas", ["ip", "addr", "add", f"{new}/24", "dev", "eth0"])


def _address(home: ThreeHosts, name: str) -> str:
    shown = {n["member"]["name"]: n for n in home.run("desk", "cluster", "nodes")["nodes"]}
    return str(shown[name]["member"]["address"])


@pytest.mark.soak
def test_a_killed_raylet_and_a_killed_head_come_back(home: ThreeHosts) -> None:
    home.process("pi", "raylet").kill()
    wait_until(lambda: home.states()["pi"] != "ready", 20, "the loss is seen")
    wait_until(lambda: home.states()["pi"] == "ready", 60, "it is back")
    killed_s = home.clock.now_s()
    home.process("desk", "gcs_server").kill()
    wait_until(lambda: "ready" not in home.states().values(), 20, "nobody is ready without a head")
    wait_until(lambda: set(home.states().values()) == {"ready"}, 90, "all are back")
    print(f"head killed: all ready after {home.clock.now_s() - killed_s:.1f} s")
    assert _engine_nodes(home) == ["desk", "nas", "pi"]


@pytest.mark.soak
def test_a_killed_coordinator_finds_its_nodes_again(home: ThreeHosts) -> None:
    killed_s = home.clock.now_s()
    os.kill(home.pids("desk")[0], signal.SIGKILL)
    home.run("desk", "cluster", "start")
    wait_until(lambda: home.states() == {"desk": "ready", "nas": "ready", "pi": "ready"}, 90, "all are back")
    print(f"coordinator killed: all ready after {home.clock.now_s() - killed_s:.1f} s")
    assert _engine_nodes(home) == ["desk", "nas", "pi"]


@pytest.mark.soak
def test_two_clusters_on_one_network_do_not_mix(home: ThreeHosts) -> None:
    line = home.run("client", "cluster", "up", "--name", "client", "--cluster-name", "office")["join"]
    try:
        found = home.run("pi", "cluster", "find", "--seconds", "3")
        assert {c["name"] for c in found} >= {"home", "office"}
        assert list(home.states("client")) == ["client"]
        refused = home.run("desk", "cluster", "join", line.split()[-1], code=2)
        assert "is the coordinator of 'home'" in refused["error"]["message"]
        home.paste("pi", line, "--name", "pi")
        assert home.states("client") == {"client": "ready", "pi": "ready"}
        wait_until(lambda: home.states("desk")["pi"] == "gone", 10, "it left the first")
        home.paste("pi", home.run("desk", "cluster", "invite")["join"], "--name", "pi")
        assert home.states("desk")["pi"] == "ready"
    finally:
        home.run("client", "cluster", "down")
    assert lifecycle.daemon_runs(home.state("pi"))
