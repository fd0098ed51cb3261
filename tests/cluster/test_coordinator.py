"""Who may ask what, and what happens to books and states: the coordinator's mind with a manual clock, no sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.clock import ManualClock
from shardwise.cluster.control import (
    Beat,
    BeatAnswer,
    Done,
    DrainRequest,
    Goodbye,
    InviteMade,
    InviteRequest,
    JoinGranted,
    JoinRequest,
    ListRequest,
    NodeCard,
    NodeList,
    RevokeRequest,
    StopRequest,
)
from shardwise.cluster.coordinator import Coordinator
from shardwise.cluster.membership import NodeState
from shardwise.cluster.ray_engine.head import HeadNews
from shardwise.cluster.state import ClusterFile
from shardwise.errors import AuthenticationFailed, CompatibilityError, UsageError
from shardwise.records import replace
from shardwise.transport.security import AllowList, ClusterKey, Invite, InviteBook, NodeKeys, fingerprint

VERSIONS = {"python": "3.11.7", "ray": "2.60.0", "shardwise": "0.1.0", "llama": "0.3.36", "platform": "Linux x86_64"}


def card(keys: NodeKeys, name: str, **changes: object) -> NodeCard:
    made = NodeCard(public=keys.public, name=name, address="10.0.0.2", memory_bytes=8 * 2**30, **VERSIONS)
    return replace(made, **changes)


class Desk:
    """A coordinator and what its owner would do."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock(1000.0)
        self.keys = NodeKeys.generate()
        self.allowed = AllowList(clock=self.clock)
        self.written: list[ClusterFile] = []
        key = ClusterKey.generate()
        cluster = ClusterFile(
            role="coordinator",
            cluster_id=key.cluster_id,
            cluster_name="home",
            name="desk",
            coordinator_public=self.keys.public,
            coordinator_addresses=("tcp://10.0.0.1:7700",),
            ray_head="10.0.0.1:7701",
            ray_token="t" * 64,
        )
        invites = InviteBook(key, self.allowed, path=folder / "invites.json", clock=self.clock)
        self.mind = Coordinator(cluster, card(self.keys, "desk"), self.allowed, invites, self.clock, self.written.append)

    def invite(self, valid_s: float = 600) -> Invite:
        reply = self.mind.handle(InviteRequest(valid_s=valid_s), self.keys.public)
        assert isinstance(reply, InviteMade)
        return Invite.decode(reply.invite)

    def join(self, keys: NodeKeys, name: str = "nas", **changes: object) -> JoinGranted:
        reply = self.mind.handle(JoinRequest(card=card(keys, name, **changes)), self.invite().keys().public)
        assert isinstance(reply, JoinGranted)
        return reply

    def beat(
        self, keys: NodeKeys, name: str = "nas", incarnation: int = 0, *, raylet: bool = True, start: int = 1, **changes: object
    ) -> BeatAnswer:
        made = Beat(card=card(keys, name, **changes), raylet_alive=raylet, raylet_start=start, incarnation=incarnation)
        reply = self.mind.handle(made, keys.public)
        assert isinstance(reply, BeatAnswer)
        return reply

    def wait(self, duration_s: float) -> None:
        for _ in range(round(duration_s / 0.25)):
            self.clock.sleep(0.25)
            self.mind.tick(own_raylet=1)

    def states(self) -> dict[str, str]:
        return {m.name: str(m.state) for m in self.mind.membership.members}


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_the_life_of_a_node(desk: Desk) -> None:
    nas = NodeKeys.generate()
    granted = desk.join(nas)
    assert (granted.name, granted.ray_head, granted.ray_token) == ("nas", "10.0.0.1:7701", "t" * 64)
    assert desk.states()["nas"] == "joining"
    assert desk.beat(nas, raylet=False).state is NodeState.JOINING
    answer = desk.beat(nas)
    assert answer.state is NodeState.READY
    desk.wait(2)
    assert desk.states() == {"desk": "ready", "nas": "ready"}
    desk.wait(1)
    assert desk.states() == {"desk": "ready", "nas": "suspect"}
    assert desk.beat(nas, incarnation=answer.incarnation).state is NodeState.READY
    assert desk.beat(nas, incarnation=answer.incarnation, raylet=False).state is NodeState.JOINING
    assert desk.beat(nas, incarnation=answer.incarnation).state is NodeState.READY
    assert desk.mind.handle(DrainRequest(), nas.public) == Done()
    assert desk.states()["nas"] == "draining"
    assert desk.mind.handle(Goodbye(asleep=False), nas.public) == Done()
    assert desk.states()["nas"] == "gone"
    with pytest.raises(AuthenticationFailed):
        desk.beat(nas)


def test_sleep_is_a_state_and_waking_needs_nobody(desk: Desk) -> None:
    lid = NodeKeys.generate()
    desk.join(lid, "laptop")
    incarnation = desk.beat(lid, "laptop").incarnation
    desk.mind.handle(Goodbye(asleep=True), lid.public)
    desk.wait(60)
    assert desk.states()["laptop"] == "asleep"
    assert desk.beat(lid, "laptop", incarnation).state is NodeState.READY


def test_an_invite_may_only_join_once(desk: Desk) -> None:
    invite = desk.invite()
    for request in (ListRequest(), DrainRequest(), StopRequest(), Goodbye(asleep=True), RevokeRequest(name="desk")):
        with pytest.raises(AuthenticationFailed):
            desk.mind.handle(request, invite.keys().public)
    first, second = NodeKeys.generate(), NodeKeys.generate()
    desk.mind.handle(JoinRequest(card=card(first, "nas")), invite.keys().public)
    with pytest.raises(AuthenticationFailed):
        desk.mind.handle(JoinRequest(card=card(second, "thief")), invite.keys().public)
    late = desk.invite(valid_s=5)
    desk.clock.sleep(6)
    with pytest.raises(AuthenticationFailed):
        desk.mind.handle(JoinRequest(card=card(second, "late")), late.keys().public)


def test_a_node_may_neither_rule_nor_speak_for_another(desk: Desk) -> None:
    nas, pi = NodeKeys.generate(), NodeKeys.generate()
    desk.join(nas)
    desk.join(pi, "pi")
    for request in (InviteRequest(valid_s=9), StopRequest(), RevokeRequest(name="pi"), DrainRequest(name="pi")):
        with pytest.raises(AuthenticationFailed):
            desk.mind.handle(request, nas.public)
    with pytest.raises(AuthenticationFailed):
        desk.mind.handle(Beat(card=card(pi, "pi"), raylet_alive=True), nas.public)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"python": "3.12.1"}, ["Python is 3.12 on nas and 3.11", "install Python 3.11"]),
        ({"ray": "2.55.0"}, ["Ray is 2.55.0", "pip install 'ray==2.60.0' on nas"]),
        ({"ray": ""}, ["Ray is missing on nas"]),
        ({"shardwise": "0.2.0"}, ["shardwise is 0.2.0"]),
        ({"llama": "0.3.1"}, ["llama-cpp-python is 0.3.1"]),
    ],
)
def test_versions_that_differ_are_refused_with_the_cure_and_the_invite_lives_on(
    desk: Desk, change: dict[str, str], words: list[str]
) -> None:
    invite, keys = desk.invite().keys().public, NodeKeys.generate()
    with pytest.raises(CompatibilityError) as caught:
        desk.mind.handle(JoinRequest(card=card(keys, "nas", **change)), invite)
    assert all(word in caught.value.one_line() for word in words)
    assert caught.value.exit_code == 4
    assert isinstance(desk.mind.handle(JoinRequest(card=card(keys, "nas")), invite), JoinGranted)


def test_patch_versions_of_python_may_differ(desk: Desk) -> None:
    desk.join(NodeKeys.generate(), python="3.11.2")


def test_the_same_host_twice_is_one_node_and_the_older_process_is_out(desk: Desk) -> None:
    nas = NodeKeys.generate()
    desk.join(nas)
    old = desk.beat(nas).incarnation
    desk.join(nas)
    new = desk.beat(nas).incarnation
    assert new > old
    assert list(desk.states()) == ["desk", "nas"]
    with pytest.raises(CompatibilityError, match="another process"):
        desk.beat(nas, incarnation=old)
    assert desk.beat(nas, incarnation=new).state is NodeState.READY


def test_two_hosts_of_one_name_are_two_nodes(desk: Desk) -> None:
    one, two = NodeKeys.generate(), NodeKeys.generate()
    assert desk.join(one).name == "nas"
    assert desk.join(two).name == "nas-2"
    desk.mind.handle(RevokeRequest(name="nas-2"), desk.keys.public)
    assert desk.states() == {"desk": "joining", "nas": "joining"}


def test_a_revoked_node_is_out_at_once_and_the_token_changes(desk: Desk) -> None:
    nas = NodeKeys.generate()
    desk.join(nas)
    desk.beat(nas)
    desk.mind.handle(RevokeRequest(name="nas"), desk.keys.public)
    assert desk.written[-1].ray_token != "t" * 64
    with pytest.raises(AuthenticationFailed):
        desk.beat(nas)
    with pytest.raises(UsageError, match="revoked"):
        desk.join(nas)
    with pytest.raises(UsageError, match="no node 'nas'"):
        desk.mind.handle(RevokeRequest(name="nas"), desk.keys.public)


def test_the_coordinator_can_neither_be_banned_nor_leave(desk: Desk) -> None:
    """Its key may do everything afterwards, and nobody else notices: the token stays."""
    desk.allowed.allow(desk.keys.public, "desk")
    requests = (RevokeRequest(name="desk"), RevokeRequest(name=desk.keys.public), Goodbye(asleep=False))
    for request in requests:
        with pytest.raises(UsageError, match="the coordinator cannot") as caught:
            desk.mind.handle(request, desk.keys.public)
        assert caught.value.exit_code == 2
    assert desk.written == []
    assert desk.allowed.permits(desk.keys.public)
    assert isinstance(desk.mind.handle(ListRequest(), desk.keys.public), NodeList)


def test_a_new_coordinator_process_takes_its_nodes_back(desk: Desk, tmp_path: Path) -> None:
    nas = NodeKeys.generate()
    desk.join(nas)
    incarnation = desk.beat(nas).incarnation
    again = Desk(tmp_path)
    again.allowed.allow(nas.public, "nas")
    answer = again.beat(nas, incarnation=incarnation)
    assert (answer.name, answer.incarnation, answer.state) == ("nas", incarnation, NodeState.READY)


def test_a_node_is_ready_only_while_rays_head_has_its_raylet(desk: Desk) -> None:
    """Of this very start: one that joined an earlier head still runs, and nothing can be placed there."""
    nas = NodeKeys.generate()
    own, identity = fingerprint(desk.keys.public), fingerprint(nas.public)
    desk.join(nas)
    desk.mind.news = HeadNews()  # the head does not answer yet
    answer = desk.beat(nas, start=7)
    assert (answer.state, answer.raylet_lost) == (NodeState.JOINING, False)
    desk.mind.news = HeadNews(answers=True, raylets=((own, 1), (identity, 6)))  # a ghost of its last start
    answer = desk.beat(nas, incarnation=answer.incarnation, start=7)
    assert (answer.state, answer.raylet_lost) == (NodeState.JOINING, True)
    desk.mind.news = HeadNews(answers=True, raylets=((own, 1), (identity, 6), (identity, 7)))
    answer = desk.beat(nas, incarnation=answer.incarnation, start=7)
    assert (answer.state, answer.raylet_lost) == (NodeState.READY, False)
    desk.wait(0.25)
    assert desk.states() == {"desk": "ready", "nas": "ready"}
    desk.mind.news = HeadNews(answers=True, raylets=((own, 1),))  # gave it up: known at once, not with its next beat
    desk.wait(0.25)
    assert desk.states() == {"desk": "ready", "nas": "joining"}
    desk.mind.news = HeadNews()
    desk.wait(0.25)
    assert desk.states() == {"desk": "joining", "nas": "joining"}


def test_a_silent_node_that_ray_gave_up_is_not_ready_as_soon_as_it_answers(desk: Desk) -> None:
    nas = NodeKeys.generate()
    own, identity = fingerprint(desk.keys.public), fingerprint(nas.public)
    desk.join(nas)
    desk.mind.news = HeadNews(answers=True, raylets=((own, 1), (identity, 1)))
    incarnation = desk.beat(nas).incarnation
    desk.wait(3)
    assert desk.states()["nas"] == "suspect"
    desk.mind.news = HeadNews(answers=True, raylets=((own, 1),))
    assert desk.beat(nas, incarnation=incarnation).state is NodeState.JOINING


@pytest.mark.parametrize("skew_s", [-86_400.0, 86_400.0])
def test_a_clock_that_is_a_day_off_is_shown_and_harms_nothing(desk: Desk, skew_s: float) -> None:
    nas = NodeKeys.generate()
    wrong = desk.clock.wall_s() + skew_s
    desk.join(nas, wall_s=wrong)
    desk.beat(nas, wall_s=wrong)
    desk.wait(1)
    listing = desk.mind.handle(ListRequest(), nas.public)
    assert isinstance(listing, NodeList)
    shown = {n.member.name: n for n in listing.nodes}
    assert shown["nas"].member.state is NodeState.READY
    assert shown["nas"].clock_skew_s == pytest.approx(skew_s, abs=2)


def test_a_new_address_arrives_with_the_beat(desk: Desk) -> None:
    nas = NodeKeys.generate()
    desk.join(nas)
    incarnation = desk.beat(nas).incarnation
    desk.beat(nas, incarnation=incarnation, address="10.0.0.77")
    member = desk.mind.membership.named("nas")
    assert member is not None
    assert (member.address, member.incarnation) == ("10.0.0.77", incarnation)


def test_going_down_is_told_with_the_next_beat(desk: Desk) -> None:
    nas = NodeKeys.generate()
    desk.join(nas)
    assert not desk.beat(nas).closing
    desk.mind.handle(StopRequest(), desk.keys.public)
    assert "nas" in [m.name for m in desk.mind.membership.usable()]
    assert desk.beat(nas).closing
    assert "nas" not in [m.name for m in desk.mind.membership.usable()]  # so that the coordinator does not wait for it
