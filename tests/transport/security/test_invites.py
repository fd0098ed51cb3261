"""Invites work once, within their time, across restarts, and nothing about them can be altered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.clock import ManualClock
from shardwise.errors import AuthenticationFailed, UsageError
from shardwise.transport.security import AllowList, ClusterKey, HandshakeWatch, Invite, InviteBook, NodeKeys
from tests.transport.security.conftest import EchoServer

COORDINATOR = NodeKeys.generate()
ADDRESSES = ("tcp://192.0.2.1:7070",)


def make_book(path: Path | None = None, clock: ManualClock | None = None) -> tuple[InviteBook, AllowList]:
    clock = clock or ManualClock(1000.0)
    allowed = AllowList(clock=clock)
    return InviteBook(ClusterKey.generate(), allowed, path=path, clock=clock), allowed


def test_encode_and_decode() -> None:
    book, _ = make_book()
    invite = book.issue(ADDRESSES, COORDINATOR.public)
    assert Invite.decode(invite.encode()) == invite
    assert invite.secret not in repr(invite)
    assert invite.secret not in str([invite])


def test_an_invite_works_once() -> None:
    book, allowed = make_book()
    invite = book.issue(ADDRESSES, COORDINATOR.public)
    node = NodeKeys.generate()
    assert allowed.permits(invite.keys().public)
    book.redeem(invite.keys().public, node.public, "nas")
    assert allowed.permits(node.public)
    assert not allowed.permits(invite.keys().public)
    with pytest.raises(AuthenticationFailed, match="already used"):
        book.redeem(invite.keys().public, NodeKeys.generate().public, "thief")


def test_two_joiners_at_the_same_time_and_one_wins() -> None:
    book, allowed = make_book()
    invite = book.issue(ADDRESSES, COORDINATOR.public)
    nodes = [NodeKeys.generate() for _ in range(8)]
    start = threading.Barrier(len(nodes))
    outcomes: list[str] = []

    def join(node: NodeKeys) -> None:
        start.wait(10)
        try:
            book.redeem(invite.keys().public, node.public, "node")
            outcomes.append("in")
        except AuthenticationFailed:
            outcomes.append("refused")

    threads = [threading.Thread(target=join, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(outcomes) == ["in"] + ["refused"] * 7
    assert sum(allowed.permits(node.public) for node in nodes) == 1


def test_an_invite_expires() -> None:
    clock = ManualClock(1000.0)
    book, allowed = make_book(clock=clock)
    invite = book.issue(ADDRESSES, COORDINATOR.public, valid_s=60)
    clock.sleep(59)
    assert allowed.permits(invite.keys().public)
    clock.sleep(1)
    assert not allowed.permits(invite.keys().public)
    with pytest.raises(AuthenticationFailed, match="expired"):
        book.redeem(invite.keys().public, NodeKeys.generate().public, "late")


def test_used_and_open_invites_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "invites"
    book, _ = make_book(path)
    used, still_open = (book.issue(ADDRESSES, COORDINATOR.public) for _ in range(2))
    book.redeem(used.keys().public, NodeKeys.generate().public, "nas")
    again, allowed = make_book(path)
    assert not allowed.permits(used.keys().public)
    assert allowed.permits(still_open.keys().public)
    with pytest.raises(AuthenticationFailed, match="already used"):
        again.redeem(used.keys().public, NodeKeys.generate().public, "thief")
    content = path.read_text()
    assert used.secret not in content
    assert still_open.secret not in content


def test_changing_the_expiry_does_not_help() -> None:
    """The time that counts is the coordinator's own note."""
    clock = ManualClock(1000.0)
    book, allowed = make_book(clock=clock)
    invite = book.issue(ADDRESSES, COORDINATOR.public, valid_s=60)
    clock.sleep(100)
    longer = Invite(
        invite_id=invite.invite_id,
        addresses=invite.addresses,
        coordinator_public=invite.coordinator_public,
        expires_at_s=1e12,
        secret=invite.secret,
    )
    assert not allowed.permits(Invite.decode(longer.encode()).keys().public)


@pytest.mark.parametrize(
    "alter",
    [lambda t: t[:-3], lambda t: t[5:], lambda t: "", lambda t: t + "A" * 5000, lambda t: "swi1_%%%", lambda t: "swi1_e30"],
)
def test_damaged_invites_are_refused_without_being_repeated(alter: Callable[[str], str]) -> None:
    book, _ = make_book()
    text = alter(book.issue(ADDRESSES, COORDINATOR.public).encode())
    with pytest.raises(UsageError) as caught:
        Invite.decode(text)
    assert not text or text not in str(caught.value)


def test_joining_over_a_real_socket_and_the_replay(server: EchoServer) -> None:
    book = InviteBook(ClusterKey.generate(), server.allowed)
    invite = Invite.decode(book.issue((server.address,), server.keys.public).encode())

    def knock() -> None:
        socket = server.client(invite.keys(), server_public=invite.coordinator_public, connect=False)
        with HandshakeWatch(socket) as watch:
            socket.connect(invite.addresses[0])
            watch.wait(2.0)

    knock()
    book.redeem(invite.keys().public, NodeKeys.generate().public, "nas")
    with pytest.raises(AuthenticationFailed, match="does not allow"):
        knock()
