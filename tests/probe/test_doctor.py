"""Every cause that the doctor knows, built as facts; and the command on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.cluster.control import NodeCard, ShownNode
from shardwise.cluster.interfaces import Interface
from shardwise.cluster.membership import LEFT, Member, NodeState
from shardwise.cluster.state import StateDir
from shardwise.probe.doctor import Facts, Finding, examine, gather
from shardwise.probe.doctor.facts import ClusterFacts, Port, Reach
from shardwise.probe.doctor.gather import sleep_of_pmset
from shardwise.records import replace

GIB = 2**30
LAN = (Interface(card="lo", address="127.0.0.1"), Interface(card="eth0", address="192.168.7.5"))
WELL = Facts(
    system="Linux",
    python="3.12.1",
    ray="2.60.0",
    zeroconf=True,
    llama="0.3.36",
    blas=True,
    compiler="g++",
    memory_bytes=12 * GIB,
    total_memory_bytes=16 * GIB,
    disk_free_bytes=100 * GIB,
    disk_folder="/home",
    interfaces=LAN,
)
CARD = NodeCard(
    public="k" * 40,
    name="desk",
    address="192.168.7.5",
    python="3.12.1",
    ray="2.60.0",
    shardwise="0.1.0",
    llama="0.3.36",
    platform="Linux x86_64",
    memory_bytes=GIB,
)


def node(name: str, state: NodeState = NodeState.READY, skew_s: float = 0.0, **card: Any) -> ShownNode:
    member = Member(identity=name, name=name, incarnation=1, state=state, since_s=0, heard_s=0, reason="silent for 12 s")
    return ShownNode(member=member, card=replace(CARD, name=name, **card), clock_skew_s=skew_s, coordinator=name == "desk")


def cluster(*nodes: ShownNode, **changes: Any) -> ClusterFacts:
    return replace(ClusterFacts(name="home", coordinator=False, daemon_runs=True, nodes=nodes), **changes)


NAT = (Interface(card="eth0", address="172.29.1.2"),)
BRIDGE = (Interface(card="eth0", address="172.17.0.2"),)
DEAF = (Reach(address="10.0.0.1:7700", use="the coordinator", problem="timed out"),)
DESK = node("desk")


def problems(facts: Facts) -> list[Finding]:
    return [finding for finding in examine(facts) if finding.level != "good"]


def test_a_healthy_machine_has_no_problem() -> None:
    assert problems(WELL) == []
    assert problems(replace(WELL, cluster=cluster(DESK, node("nas"), node("pi", NodeState.DRAINING)))) == []


def test_one_node_is_not_called_nodes() -> None:
    for nodes, words in (((DESK,), ", 1 node known"), ((DESK, node("nas")), ", 2 nodes known")):
        said = [f.message for f in examine(replace(WELL, cluster=cluster(*nodes))) if f.check == "cluster"]
        assert said[0].endswith(words)


def test_a_machine_that_left_is_no_problem() -> None:
    left = node("nas", NodeState.GONE, ray="2.55.1")
    left = replace(left, member=replace(left.member, reason=LEFT))
    assert problems(replace(WELL, cluster=cluster(DESK, left))) == []


@pytest.mark.parametrize(
    ("change", "level", "words", "cure"),
    [
        ({"python": "3.10.2"}, "bad", "Python 3.10.2", "3.11"),
        ({"llama_problem": "llama.cpp cannot be loaded"}, "bad", "cannot be loaded", "force-reinstall"),
        ({"gpu_seen": "an NVIDIA GPU"}, "warning", "built without it", "DGGML_CUDA=on"),
        ({"gpu_seen": "an AMD GPU"}, "warning", "built without it", "DGGML_VULKAN=on"),
        ({"blas": False}, "warning", "without OpenBLAS", "GGML_BLAS"),
        ({"compiler": ""}, "warning", "no C++ compiler", "build-essential"),
        ({"slow_environment": ("OPENBLAS_CORETYPE",)}, "warning", "OPENBLAS_CORETYPE", "unset"),
        ({"memory_bytes": GIB // 4}, "bad", "256 MiB of 16 GiB", "close other programs"),
        ({"memory_bytes": GIB, "cgroup_bytes": GIB}, "warning", "control group", "close other programs"),
        ({"disk_free_bytes": GIB}, "warning", "1 GiB free", "SHARDWISE_CACHE"),
        ({"ray": ""}, "warning", "works alone", "bootstrap.py ray"),
        ({"ray": "2.40.0"}, "bad", "too old", "ray>=2.55"),
        ({"ray": "2.99.0"}, "warning", "newer than 2.60", "2.60"),
        ({"zeroconf": False}, "warning", "no cluster is found", "zeroconf"),
        ({"shared_memory_bytes": 64 * 2**20}, "warning", "/dev/shm", "--shm-size"),
        ({"interfaces": LAN[:1]}, "bad", "no network", "connect"),
        ({"wsl": True, "interfaces": NAT}, "bad", "behind NAT", "mirrored"),
        ({"container": True, "interfaces": BRIDGE}, "warning", "container", "--network=host"),
        ({"wifi_power_save": ("wlan0",)}, "warning", "wlan0 saves power", "power_save off"),
        ({"ports": (Port(number=7701, use="head", problem="in use"),)}, "bad", "7701 (head)", "--port"),
        ({"firewalls": ("ufw",)}, "warning", "ufw is on", "192.168.7.0/24"),
        ({"firewalls": ("firewalld",)}, "warning", "firewalld is on", "192.168.7.0/24"),
        ({"firewalls": ("Windows",)}, "warning", "Windows is on", "New-NetFirewallRule"),
        ({"sleeps": "closing the lid suspends this machine"}, "warning", "lid", "HandleLidSwitch"),
        ({"cluster": cluster(daemon_runs=False)}, "bad", "daemon does not run", "cluster start"),
        ({"cluster": cluster(trouble="port 7702 cannot be used")}, "bad", "7702", "daemon.log"),
        ({"cluster": cluster(reach=DEAF)}, "bad", "the coordinator at 10.0.0.1:7700", "firewall"),
        ({"cluster": cluster(DESK, node("nas", NodeState.GONE))}, "warning", "nas is gone: silent for 12 s", "on nas"),
        ({"cluster": cluster(DESK, node("nas", skew_s=-86_400))}, "warning", "1440 min 0 s behind", "set-ntp"),
        ({"cluster": cluster(DESK, node("nas", python="3.11.4"))}, "bad", "Python is 3.11 on nas", "Python 3.12"),
        ({"cluster": cluster(DESK, node("nas", ray="2.55.1"))}, "bad", "Ray is 2.55.1 on nas", "ray==2.60.0"),
    ],
)  # fmt: skip
def test_each_cause_is_named_with_its_cure(change: dict[str, Any], level: str, words: str, cure: str) -> None:
    found = problems(replace(WELL, **change))
    assert [f.level for f in found if words in f.message and cure in f.cure] == [level], found
    assert all(f.cure for f in found)


def test_macs_and_windows_are_told_that_ray_is_experimental_there() -> None:
    for system in ("Darwin", "Windows"):
        assert any("experimental" in f.message for f in problems(replace(WELL, system=system)))


def test_pmset() -> None:
    text = "Battery Power:\n sleep                1\nAC Power:\n disksleep            10\n sleep                15\n"
    assert sleep_of_pmset(text) == "it sleeps after 15 minutes on power"
    assert sleep_of_pmset(text.replace("15", "0")) == ""


def test_this_machine_can_be_examined(tmp_path: Path) -> None:
    facts = gather(StateDir(tmp_path / "none"), tmp_path / "cache" / "deep")
    assert facts.llama_problem == ""
    assert facts.cluster is None
    assert facts.disk_folder == str(tmp_path)
    assert {p.number for p in facts.ports} == {7700, 7701, 7702, 7703}


def test_the_command_prints_one_document_and_leaves_nothing(tmp_path: Path) -> None:
    env = os.environ | {"SHARDWISE_STATE": str(tmp_path / "state"), "SHARDWISE_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "shardwise.cli", "--json", "doctor"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    document = json.loads(done.stdout)
    assert document["ok"] == (done.returncode == 0)
    assert {f["check"] for f in document["findings"]} >= {"python", "llama.cpp", "memory", "network", "ray"}
    assert list(tmp_path.iterdir()) == []
