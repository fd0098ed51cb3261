"""Addresses, versions, memory limits and Ray's node lists: pure functions over plain data."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.cluster.interfaces import Interface, choose_address, list_interfaces, rank, url_host
from shardwise.cluster.machine import cgroup_free_bytes, safe_name, usable_memory_bytes
from shardwise.cluster.ray_engine.discovery import living_nodes
from shardwise.cluster.ray_engine.settings import RaySecurity, ray_environment, version_pair
from shardwise.cluster.state import StateDir, port_plan
from shardwise.errors import UsageError

CARDS = [
    Interface(card="lo", address="127.0.0.1"),
    Interface(card="docker0", address="172.17.0.1", bits_per_s=10**10),
    Interface(card="wlan0", address="192.168.1.7", bits_per_s=300 * 10**6),
    Interface(card="eth0", address="192.168.1.6", bits_per_s=10**9),
    Interface(card="eth0", address="fd00::6", bits_per_s=10**9),
    Interface(card="eth1", address="10.0.0.6", up=False, bits_per_s=10**10),
    Interface(card="tun0", address="10.8.0.2"),
    Interface(card="eth2", address="169.254.3.4"),
]


def test_the_wired_home_address_comes_first() -> None:
    assert [i.address for i in rank(CARDS)][:3] == ["192.168.1.6", "192.168.1.7", "fd00::6"]
    assert choose_address(interfaces=CARDS) == "192.168.1.6"
    assert {"127.0.0.1", "10.0.0.6"}.isdisjoint(i.address for i in rank(CARDS))


@pytest.mark.parametrize(
    ("pinned", "address"),
    [("wlan0", "192.168.1.7"), ("fd00::6", "fd00::6"), ("eth0", "192.168.1.6"), ("127.0.0.1", "127.0.0.1")],
)
def test_a_pinned_card_or_address_wins(pinned: str, address: str) -> None:
    assert choose_address(pinned, interfaces=CARDS) == address


def test_a_wrong_pin_lists_what_there_is() -> None:
    with pytest.raises(UsageError, match="'eth9'") as caught:
        choose_address("eth9", interfaces=CARDS)
    assert "wlan0 192.168.1.7" in caught.value.hint
    with pytest.raises(UsageError, match="no network but loopback"):
        choose_address(interfaces=CARDS[:1])


def test_this_machine_has_addresses() -> None:
    assert list_interfaces()
    assert choose_address(toward="127.0.0.1") == "127.0.0.1"
    assert url_host("fd00::1") == "[fd00::1]"
    assert url_host("10.0.0.1") == "10.0.0.1"


def entry(node_id: str, name: str = "", identity: str = "", incarnation: str = "", **changes: object) -> dict[str, object]:
    labels = {"shardwise-node": name, "shardwise-identity": identity, "shardwise-incarnation": incarnation}
    base: dict[str, object] = {
        "NodeID": node_id,
        "Alive": True,
        "NodeManagerAddress": f"10.0.0.{len(node_id)}",
        "NodeManagerHostname": "box",
        "NodeName": f"10.0.0.{len(node_id)}",
        "Resources": {"memory": 1000.0},
        "Labels": {k: v for k, v in labels.items() if v},
    }
    return base | changes


def test_ghosts_are_replaced_by_identity_not_by_name() -> None:
    listed = [
        entry("a", "nas", "id1", "3"),
        entry("bb", "nas", "id1", "12"),  # later: 12 > 3 as a number
        entry("ccc", "nas", "id2", "1"),  # another machine of the same name
        entry("dddd", "desk", "id3", "1", Alive=False),
    ]
    nodes = living_nodes(listed)
    assert {name: node.node_id for name, node in nodes.items()} == {"nas": "bb", "nas-2": "ccc"}
    assert nodes["nas"].info.memory_bytes == 1000


def test_raylets_of_others_are_named_by_host() -> None:
    nodes = living_nodes([entry("a"), entry("bb"), entry("ccc", NodeName="gpu-box")])
    assert set(nodes) == {"box", "box-2", "gpu-box"}
    assert nodes["box"].info.identity == "a"


def test_rays_environment_is_complete_and_the_token_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")
    security = RaySecurity(token="s" * 64)
    environment = ray_environment(security)
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN"] == "s" * 64
    assert "RAY_ADDRESS" not in environment
    assert "sss" not in repr(security)
    assert "RAY_AUTH_TOKEN" not in ray_environment(RaySecurity())
    assert version_pair("2.60.0rc1") == (2, 60)


def test_memory_limits_of_cgroups_are_found_at_every_level(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("0::/user/box\n")
    inner = tmp_path / "fs" / "user" / "box"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("100\n")
    (inner.parent / "memory.max").write_text("5000\n")
    (inner.parent / "memory.current").write_text("2000\n")
    assert cgroup_free_bytes(tmp_path / "fs", groups) == 3000
    (inner / "memory.max").write_text("150\n")
    assert cgroup_free_bytes(tmp_path / "fs", groups) == 50


def test_memory_limits_of_version_1(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("4:cpu,cpuacct:/x\n3:memory:/box\n")
    box = tmp_path / "fs" / "memory" / "box"
    box.mkdir(parents=True)
    (box / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (box / "memory.usage_in_bytes").write_text("7\n")
    assert cgroup_free_bytes(tmp_path / "fs", groups) is None
    (box / "memory.limit_in_bytes").write_text("1007\n")
    assert cgroup_free_bytes(tmp_path / "fs", groups) == 1000


def test_names_and_ports() -> None:
    assert safe_name("Anna's MacBook Pro") == "Anna-s-MacBook-Pro"
    assert safe_name("///") == "node"
    assert len(safe_name("x" * 99)) == 40
    assert usable_memory_bytes() > 0
    plan = port_plan(7700)
    assert len(set(plan.values())) == len(plan)
    assert max(plan.values()) < 7800
    assert set(port_plan(0).values()) == {0}


def test_no_cluster_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_STATE", str(tmp_path / "s"))
    with pytest.raises(UsageError, match="this machine is in no cluster") as caught:
        StateDir().load_cluster()
    assert "cluster up" in caught.value.hint
