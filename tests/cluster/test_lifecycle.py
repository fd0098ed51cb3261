"""up, join, nodes, leave, down: the real program, real daemons, real Ray; each host is a state folder of its own."""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path

import pytest

from shardwise.cluster import lifecycle
from shardwise.errors import CompatibilityError, UsageError
from shardwise.records import replace
from shardwise.transport.security import Invite, NodeKeys
from tests.cluster.engine_contract import tiny
from tests.cluster.hosts import PORTS, Hosts
from tests.cluster.waiting import is_gone, wait_until


def test_both_are_ready_and_every_file_is_private(home: Hosts) -> None:
    assert home.states() == {"desk": "ready", "nas": "ready"}
    assert home.states("nas") == home.states("desk")
    for host in ("desk", "nas"):
        for path in home.state(host).folder.rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
        assert (home.state(host).tls / "node.key").exists()
    table = home.python("nas", "-m", "shardwise.cli", "cluster", "nodes")
    assert "coordinator" in table
    assert "2 GiB" in table


def test_the_engine_of_the_cluster_works_from_any_machine(home: Hosts) -> None:
    engine = lifecycle.attach(home.state("nas"))
    try:
        assert {i.name: i.memory_bytes for i in engine.node_infos()} == {"desk": 2**30, "nas": 2 * 2**30}
        assert lifecycle.own_node(home.state("nas"), engine.node_infos()).name == "nas"
        engine.start(tiny("w", "nas"))
        assert lifecycle.num_workers_here(home.state("nas")) == 1
        assert lifecycle.num_workers_here(home.state("desk")) == 0
    finally:
        engine.close()


def test_up_again_only_invites_again(home: Hosts) -> None:
    before = home.pids("desk")[0]
    assert home.run("desk", "cluster", "up")["invite"] != home.run("desk", "cluster", "invite")["invite"]
    assert home.pids("desk")[0] == before


@pytest.mark.parametrize(
    ("host", "command", "code", "words"),
    [
        ("desk", ["join", "nonsense"], 2, "this is not an invite"),
        ("desk", ["leave"], 2, "the coordinator cannot leave"),
        ("nas", ["down"], 2, "was made on another machine"),
        ("nas", ["up"], 2, "is a node of 'home'"),
        ("nas", ["invite"], 2, "only the machine that the cluster was made on"),
        ("pi", ["nodes"], 2, "this machine is in no cluster"),
        ("pi", ["up", "--interface", "eth99"], 2, "no usable interface or address 'eth99'"),
        ("desk", ["revoke", "attic"], 2, "no node 'attic'"),
        ("desk", ["revoke", "desk"], 2, "the coordinator cannot be banned"),
    ],
)
def test_bad_commands_say_why(home: Hosts, host: str, command: list[str], code: int, words: str) -> None:
    assert words in home.run(host, "cluster", *command, code=code)["error"]["message"]
    if host != "pi":
        assert home.states(host) == {"desk": "ready", "nas": "ready"}  # and nothing has changed


def test_a_line_that_was_changed_is_refused_and_leaves_nothing_behind(home: Hosts) -> None:
    """Cut off, another secret or coordinator's key, an address where nobody listens; also from a machine that is a member."""
    text, stranger = home.run("desk", "cluster", "invite")["invite"], NodeKeys.generate()

    def forged(**changes: object) -> str:
        return replace(Invite.decode(text), **changes).encode()

    cases = [
        (text[:-9], 2, "this invite is damaged"),
        (forged(secret=stranger.secret), 4, "does not take this invite"),
        (forged(coordinator_public=stranger.public), 4, "does not take this invite"),
        (forged(addresses=("tcp://127.0.0.1:9",)), 5, "coordinator does not answer: nobody listens there"),
        (forged(addresses=("desk",)), 2, "not an address: desk"),
    ]
    before = home.pids("nas")
    for host, some in (("pi", cases), ("nas", cases[:2])):
        for line, code, words in some:
            assert words in home.run(host, "cluster", "join", line, code=code)["error"]["message"]
    assert home.pids("nas") == before
    assert home.states() == {"desk": "ready", "nas": "ready"}
    assert not home.state("pi").cluster.exists()


def test_a_ray_that_is_not_there_is_not_attached_to(home: Hosts) -> None:
    for address, code, words in (("127.0.0.1", 2, "--ray-address 127.0.0.1"), ("127.0.0.1:9", 5, "")):
        assert words in home.run("pi", "cluster", "up", "--ray-address", address, code=code)["error"]["message"]
        assert not home.state("pi").cluster.exists()


def test_a_used_invite_and_a_taken_port_leave_nothing_behind(home: Hosts) -> None:
    invite = home.run("desk", "cluster", "invite")["invite"]
    failed = home.run("pi", "cluster", "join", invite, "--port", str(PORTS["nas"]), "--name", "pi", code=2)
    assert f"port {PORTS['nas'] + 2} cannot be used" in failed["error"]["message"]
    refused = home.run("pi", "cluster", "join", invite, "--port", str(PORTS["pi"]), code=4)
    assert "does not take this invite" in refused["error"]["message"]


@pytest.mark.soak
def test_a_killed_raylet_comes_back_by_itself(home: Hosts) -> None:
    home.process("nas", "raylet").kill()
    wait_until(lambda: home.states()["nas"] != "ready", 20, "the loss is seen")
    wait_until(lambda: home.states()["nas"] == "ready", 60, "it is back")


@pytest.mark.soak
def test_a_killed_daemon_takes_everything_along_and_starts_again(home: Hosts) -> None:
    pids, folder = home.pids("nas"), Path(home.state("nas").ray_folder.read_text())
    os.kill(pids[0], signal.SIGKILL)
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid), 20, f"{pid} is gone with its daemon")
    wait_until(lambda: home.states()["nas"] == "suspect", 10, "silence is seen")
    home.run("nas", "cluster", "start")
    assert home.states()["nas"] == "ready"
    assert not folder.exists()


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["coordinator", "head"])
def test_once_the_nodes_are_ready_again_work_can_be_placed_on_each(home: Hosts, victim: str) -> None:
    """Raylets that joined the head that was killed still run for a while; on them nothing can be placed."""
    started_s = time.perf_counter()
    if victim == "coordinator":
        os.kill(home.pids("desk")[0], signal.SIGKILL)
        home.run("desk", "cluster", "start")
    else:
        home.process("desk", "gcs_server").kill()
        wait_until(lambda: "ready" not in in_process(home), 5, "nobody is ready without a head")
    wait_until(lambda: in_process(home) == ["ready", "ready"], 60, "all are ready")
    print(f"{victim} killed: all ready after {time.perf_counter() - started_s:.1f} s")
    engine = lifecycle.attach(home.state("desk"))
    try:
        for node in ("desk", "nas"):
            engine.start(tiny(f"on-{node}", node))
            assert engine.status(f"on-{node}").alive
    finally:
        engine.close()


def in_process(home: Hosts) -> list[str]:
    """The nodes' states, asked without a new program."""
    return [str(node.member.state) for node in lifecycle.nodes(home.state("desk")).nodes if node.member.name in ("desk", "nas")]


def test_the_whole_line_in_quotes_will_do_and_leaving_is_for_good(home: Hosts) -> None:
    line = home.run("desk", "cluster", "invite")["join"]
    more = ["--port", str(PORTS["pi"]), "--name", "nas", "--memory", "1 GiB"]
    assert home.run("pi", "cluster", "join", line, *more)["cluster"] == "home"
    assert home.states() == {"desk": "ready", "nas": "ready", "nas-2": "ready"}
    assert home.run("pi", "cluster", "leave", "--drain", "--wait", "5") == {"left": True, "workers_ended": 0}
    assert [path.name for path in home.state("pi").folder.iterdir()] == ["node.key"]
    assert home.states()["nas-2"] == "gone"
    with pytest.raises(UsageError):
        lifecycle.nodes(home.state("pi"))


@pytest.mark.soak
def test_joining_the_same_host_twice_replaces_it(home: Hosts) -> None:
    invite = home.run("desk", "cluster", "invite")["invite"]
    home.run("nas", "cluster", "join", invite, "--name", "nas", "--port", str(PORTS["nas"]), "--memory", "2 GiB")
    assert home.states()["nas"] == "ready"
    assert list(home.states()).count("nas") == 1


def test_versions_that_differ_are_refused_at_the_door(home: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    invite = home.run("desk", "cluster", "invite")["invite"]
    other = {"python": "3.12.0", "ray": "2.60.0", "shardwise": "9", "llama": "0", "platform": "Linux x86_64"}
    monkeypatch.setattr("shardwise.cluster.machine.own_versions", lambda: other)
    with pytest.raises(CompatibilityError, match=r"Python is 3\.12"):
        lifecycle.join(home.state("pi"), invite, lifecycle.JoinOptions(name="pi"))
    assert not home.state("pi").cluster.exists()
