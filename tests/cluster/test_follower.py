"""A running deployment reacts to machines that come and go: real workers under several node names, members as data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.clock import SystemClock
from shardwise.cluster.follow_policy import FollowPolicy
from shardwise.cluster.membership import Member, NodeState
from shardwise.deploy import Deployment, Placement, RunOptions, launch
from shardwise.deploy.following import Follower
from shardwise.errors import ConnectFailed
from shardwise.machines import load_cluster
from shardwise.machines.profile import ClusterProfile
from shardwise.session.recovery import RecoveryPolicy
from tests.cluster.test_following import member
from tests.cluster.waiting import wait_until
from tests.deploy.faults import Watched, request, undisturbed
from tests.deploy.test_changes import Nodes

MIB = 2**20
NO_REPLICAS = RecoveryPolicy()
NODE = '[[node]]\nname = "{}"\nmemory = "2 GiB"\nmemory_bandwidth = "{} GB/s"\ncompute = "{} TFLOP/s"\n'
LINKS = '[defaults.link]\nbandwidth = "1 Gbit/s"\nlatency = "0.3 ms"\n'
SLOW = NODE.format("desktop", 5, 0.05) + NODE.format("laptop", 5, 0.05)
WITH_NAS = SLOW + NODE.format("nas", 50, 0.5) + LINKS


class SomeMembers:
    """Who is there, as the test says."""

    def __init__(self) -> None:
        self.states: dict[str, NodeState] = dict.fromkeys(("desktop", "laptop"), NodeState.READY)
        self.away = False

    def __call__(self) -> tuple[Member, ...]:
        if self.away:
            raise ConnectFailed("the coordinator is away")
        return tuple(member(name, state) for name, state in self.states.items())

    def close(self) -> None:
        pass


class Following:
    """A deployment on two of three nodes, and its follower."""

    def __init__(self, sample: Path, recovery: RecoveryPolicy = NO_REPLICAS) -> None:
        self.engine, self.members = Nodes(), SomeMembers()
        self.engine.gone.add("nas")
        options = RunOptions(num_stages=2, context_tokens=512, deterministic=True, recovery=recovery)
        places = [Placement(node="desktop"), Placement(node="laptop")]
        self.deployment = launch(sample, options, engine=self.engine, placements=places)

    def follow(self, policy: FollowPolicy) -> Follower:
        follower = self.deployment.follower = Follower(self.deployment, self.members, policy, SystemClock())
        follower.start()
        return follower

    def join(self, name: str) -> None:
        self.members.states[name] = NodeState.READY
        self.engine.gone.discard(name)

    @property
    def nodes(self) -> list[str]:
        return [stage.node for stage in self.deployment.stages]


@pytest.fixture
def following(sample_gguf: Path) -> Iterator[Following]:
    made = Following(sample_gguf)
    with made.deployment:
        yield made


def policy(path: Path, text: str, *, auto: bool) -> FollowPolicy:
    path.write_text(text)
    return FollowPolicy(auto=auto, cluster_file=str(path), settle_s=0.5, between_moves_s=1.0)


def long_request(deployment: Deployment) -> Watched:
    session = Watched(deployment, request(deployment, num_tokens=100))
    session.wait_for(5)
    return session


def test_a_machine_that_joins_is_only_shown_without_consent_and_used_with_it(following: Following, tmp_path: Path) -> None:
    deployment = following.deployment
    wanted = undisturbed(deployment, request(deployment, num_tokens=100))
    follower = following.follow(policy(tmp_path / "home.toml", WITH_NAS, auto=False))
    following.join("nas")
    wait_until(lambda: any("with nas" in note.text for note in deployment.notes), 20, "it is proposed")
    assert follower.proposal is not None
    assert follower.proposal.nodes_added == ("nas",)
    assert follower.proposal.total_bytes > 50 * MIB
    assert (following.nodes, follower.num_moves) == (["desktop", "laptop"], 0)
    follower.close()

    session = long_request(deployment)
    follower = following.follow(policy(tmp_path / "home.toml", WITH_NAS, auto=True))
    assert session.ids() == wanted
    wait_until(lambda: follower.num_moves == 1, 30, "it is carried out")
    assert "nas" in following.nodes
    assert undisturbed(deployment, request(deployment, num_tokens=100)) == wanted
    print([note.text for note in follower.notes])


def test_a_stranger_is_measured_first(following: Following, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def measure(infos: list[object], known: ClusterProfile) -> ClusterProfile:
        asked.append([info.name for info in infos])  # type: ignore[attr-defined]
        (tmp_path / "measured.toml").write_text(WITH_NAS)
        return load_cluster(tmp_path / "measured.toml")

    follower = following.follow(policy(tmp_path / "home.toml", SLOW + LINKS, auto=True))
    following.join("nas")
    wait_until(lambda: any("'shardwise probe' measures it" in note.text for note in follower.notes), 20, "it is said")
    follower.measure = measure  # type: ignore[assignment]
    (tmp_path / "home.toml").write_text(SLOW + LINKS + "# measured again\n")
    wait_until(lambda: follower.num_moves == 1, 40, "measured, planned, moved")
    assert asked == [["desktop", "laptop", "nas"]]
    assert "nas" in following.nodes


def test_a_node_that_drains_is_emptied_under_load_without_being_asked(following: Following) -> None:
    deployment = following.deployment
    wanted = undisturbed(deployment, request(deployment, num_tokens=100))
    following.follow(FollowPolicy())
    following.join("nas")
    following.members.away = True  # for a moment: nothing happens
    session = long_request(deployment)
    following.members.states["laptop"] = NodeState.DRAINING
    following.members.away = False
    wait_until(lambda: not deployment.works_on("laptop"), 30, "its stages moved away")
    assert session.ids() == wanted
    assert following.nodes[0] == "desktop"
    assert {status.node for status in following.engine.statuses()} == set(following.nodes)


def test_where_no_node_has_room_for_a_stage_the_split_changes(following: Following) -> None:
    """Two nodes are left with half a stage's room each; then one that cannot be emptied is said once and waits."""
    deployment = following.deployment
    following.join("nas")
    following.members.states["desktop"] = NodeState.DRAINING
    following.engine.free_bytes = 1  # no room at all
    following.follow(FollowPolicy())
    wait_until(lambda: any("cannot be emptied" in note.text for note in deployment.notes), 20, "it is said")
    assert following.nodes == ["desktop", "laptop"]
    following.engine.free_bytes = 450 * MIB
    following.members.states["nas"] = NodeState.SUSPECT  # one fewer: another situation, tried at once
    wait_until(lambda: not deployment.works_on("desktop"), 30, "then it moved")
    assert len(list(deployment.generate("Hello", max_tokens=3, ignore_eos=True))) == 3


def test_replicas_leave_too(sample_gguf: Path) -> None:
    following = Following(sample_gguf, RecoveryPolicy(replicate="standby"))
    with following.deployment as deployment:
        following.join("nas")
        following.members.states["laptop"] = NodeState.DRAINING
        following.follow(FollowPolicy())
        wait_until(lambda: any("nothing runs" in note.text for note in deployment.notes), 30, "it is empty")
        assert not deployment.works_on("laptop")
        assert {status.node for status in following.engine.statuses()} == {"desktop", "nas"}
        wait_until(lambda: len(deployment.driver.peers.replicas) == 2, 30, "replicas stand by again")
        assert len(list(deployment.generate("Hello", max_tokens=3, ignore_eos=True))) == 3
