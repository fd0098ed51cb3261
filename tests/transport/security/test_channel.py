"""The channel's door: who is read, who is not, and that no bytes make it stumble."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from shardwise.errors import CompatibilityError, ManifestMismatch
from shardwise.records import replace
from shardwise.transport import handshake
from shardwise.transport.channel import DRIVER, SHORT_PAYLOAD_BYTES, Envelope, Inbox, Outbox, together
from shardwise.transport.handshake import Hello
from shardwise.transport.messages import PROTOCOL_VERSION, OpenSession, Ping, encode
from shardwise.transport.security import MAX_FRAME_BYTES, AllowList, Authenticator, NodeKeys, secure_client
from tests.transport.security.test_handshake import OWN, mutate


class Door:
    """An inbox with its list."""

    def __init__(self, context: zmq.Context) -> None:
        self.context, self.keys, self.allowed = context, NodeKeys.generate(), AllowList()
        self.authenticator = Authenticator(context, self.allowed)
        self.inbox = Inbox(context, "tcp://127.0.0.1:*", OWN, self.keys, self.allowed)
        self.outboxes: list[Outbox] = []

    def outbox(self, name: str, *, stage: int = DRIVER) -> Outbox:
        keys = NodeKeys.generate()
        self.allowed.allow(keys.public, name)
        made = Outbox(self.context, self.inbox.address, replace(OWN, stage=stage), keys, self.keys.public)
        self.outboxes.append(made)
        return made

    def next(self, timeout_s: float = 5.0) -> Envelope | None:
        deadline_s = time.perf_counter() + timeout_s
        while time.perf_counter() < deadline_s:
            self.inbox.wait(0.05)
            if (envelope := self.inbox.receive()) is not None:
                return envelope
        return None

    def close(self) -> None:
        for outbox in self.outboxes:
            outbox.close(linger_ms=0)
        self.inbox.close()
        self.authenticator.close()


@pytest.fixture
def door(context: zmq.Context) -> Iterator[Door]:
    made = Door(context)
    yield made
    made.close()


def ping(number: int) -> Ping:
    return Ping(sequence=number, sent_s=0.0)


def answer(outbox: Outbox, door: Door) -> None:
    """Let the inbox answer, and read that."""
    deadline_s = time.perf_counter() + 5
    while not outbox.welcomed and time.perf_counter() < deadline_s:
        door.inbox.wait(0.02)
        assert door.inbox.receive() is None
        outbox.receive()


SIZES = [0, 1, 2304, SHORT_PAYLOAD_BYTES, SHORT_PAYLOAD_BYTES + 1, MAX_FRAME_BYTES + 1, 3 * MAX_FRAME_BYTES + 17]


@pytest.mark.parametrize("size", SIZES)
def test_messages_of_a_welcomed_peer(size: int, door: Door) -> None:
    outbox = door.outbox("stage-1", stage=1)
    payload = random.Random(1).randbytes(size)
    outbox.send(ping(1), payload)
    envelope = door.next()
    assert envelope is not None
    assert (envelope.message, envelope.stage) == (ping(1), 1)
    assert envelope.payload is not None
    assert bytes(envelope.payload) == payload


def test_a_short_payload_travels_with_its_header(door: Door) -> None:
    outbox = door.outbox("stage-1", stage=1)
    answer(outbox, door)
    for size, num_frames in ((None, 1), (2304, 1), (SHORT_PAYLOAD_BYTES + 1, 2), (2 * MAX_FRAME_BYTES, 3)):
        sent_bytes = outbox.send(ping(1), None if size is None else bytes(size))
        assert door.inbox.wait(5)
        frames = door.inbox.socket.recv_multipart()[1:]
        assert (len(frames), sum(map(len, frames))) == (num_frames, sent_bytes)


@pytest.mark.parametrize("num_tokens", [100_000, 110_000, 1_000_000])
def test_a_prompt_that_is_longer_than_a_frame(num_tokens: int, door: Door) -> None:
    outbox = door.outbox("driver")
    tokens = tuple(random.Random(2).choices(range(70_000, 260_000), k=num_tokens))
    opened = OpenSession(session=1, epoch=1, tokens=tokens, num_prompt=num_tokens, max_tokens=4)
    outbox.send(opened)
    outbox.send(ping(2))
    for expected in (opened, ping(2)):
        envelope = door.next()
        assert envelope is not None
        assert envelope.message == expected


@pytest.mark.parametrize("lie", [-12, -1, 1, 2**31, 2**32 - 1])
def test_a_header_that_is_not_as_long_as_it_says_is_dropped(lie: int, door: Door) -> None:
    outbox = door.outbox("stage-1", stage=1)
    answer(outbox, door)
    header = encode(ping(1))
    said = (len(header) + lie) % 2**32
    for frame in (b"\xc1", b"\xc1\1\0", b"\xc1" + said.to_bytes(4, "little") + header + b"payload"):
        outbox.socket.send(frame)
    outbox.send(ping(2))
    envelope = door.next()
    assert envelope is not None
    assert envelope.message == ping(2)
    assert door.inbox.num_malformed == 3


@pytest.mark.parametrize(("name", "stage"), [("stage-1", DRIVER), ("stage-1", 2), ("driver", 0)])
def test_a_key_may_only_be_what_it_was_made_for(door: Door, name: str, stage: int) -> None:
    outbox = door.outbox(name, stage=stage)
    outbox.send(ping(1))
    assert door.next(0.5) is None
    with pytest.raises(ManifestMismatch, match="stage of this key differs") as caught:
        outbox.receive()
    assert caught.value.exit_code == 4


def test_a_banned_key_is_dead_on_its_open_connection(door: Door) -> None:
    outbox, other = door.outbox("stage-1", stage=1), door.outbox("driver")
    outbox.send(ping(1))
    assert door.next() is not None
    door.allowed.revoke("stage-1")
    outbox.send(ping(2))
    other.send(ping(3))
    envelope = door.next()
    assert envelope is not None
    assert envelope.message == ping(3)
    assert door.next(0.3) is None


def test_a_new_epoch_fences_who_does_not_greet_again(door: Door) -> None:
    stale = door.outbox("stage-1", stage=1)
    stale.send(ping(1))
    assert door.next() is not None
    door.inbox.set_hello(replace(OWN, epoch=OWN.epoch + 1))
    stale.send(ping(2))
    assert door.next(0.3) is None
    stale.greet(replace(OWN, stage=1))
    stale.send(ping(3))
    assert door.next(0.3) is None
    with pytest.raises(ManifestMismatch, match="deployment epoch differs"):
        stale.receive()
    stale.greet(replace(OWN, stage=1, epoch=OWN.epoch + 1))
    stale.send(ping(4))
    envelope = door.next()
    assert envelope is not None
    assert envelope.message == ping(4)


def test_without_a_hello_nothing_is_read(door: Door) -> None:
    outbox = door.outbox("driver")
    with door.context.socket(zmq.DEALER) as silent:
        keys = NodeKeys.generate()
        door.allowed.allow(keys.public, "friend")

        secure_client(silent, keys, door.keys.public)
        silent.connect(door.inbox.address)
        silent.send(encode(ping(1)))
        assert door.next(0.5) is None
    outbox.send(ping(2))
    assert door.next() is not None


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1])
def test_other_versions_get_an_answer_with_both_values(door: Door, version: int) -> None:
    outbox = door.outbox("driver")
    answer(outbox, door)
    old = {"t": "hello", "protocol_version": version, "what": "ever"}
    outbox.welcomed = False
    outbox.socket.send(msgspec.msgpack.encode(old))
    assert door.next(0.3) is None
    with pytest.raises(CompatibilityError, match=f"the peer has {PROTOCOL_VERSION}, here it is {version}"):
        outbox.receive()


def fuzz_door(door: Door, num_messages: int) -> None:
    """A member sends damaged messages in damaged framings; the inbox neither stops nor falls over."""
    outbox, source = door.outbox("driver"), random.Random(11)
    answer(outbox, door)
    seeds = [encode(ping(1)), handshake.encode(OWN), handshake.encode(handshake.answer(OWN, OWN)), b""]
    seeds.append(together(encode(ping(1)), bytes(40)))
    sent = 0
    while sent < num_messages:
        for _ in range(min(500, num_messages - sent)):
            frames = [mutate(source.choice(seeds), source) for _ in range(source.choice((1, 1, 1, 2, 3, 9)))]
            outbox.socket.send_multipart(frames)
            sent += 1
        while door.inbox.wait(0.05):
            door.inbox.receive()
        while outbox.socket.poll(0):
            outbox.socket.recv()
    outbox.greet(OWN)
    answer(outbox, door)
    outbox.send(ping(99))
    deadline_s = time.perf_counter() + 10
    while time.perf_counter() < deadline_s:
        envelope = door.next()
        if envelope is not None and envelope.message == ping(99):
            return
    raise AssertionError("the inbox does not answer any more")


def test_damaged_messages(door: Door) -> None:
    fuzz_door(door, 5_000)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_million_damaged_messages(door: Door) -> None:
    fuzz_door(door, 1_000_000)


def test_hello_is_recognised_by_its_first_bytes() -> None:
    """The channel looks for the tag before decoding; the codec must keep writing it first."""
    assert b"\xa1t\xa5hello" in handshake.encode(OWN)[:16]
    assert isinstance(handshake.read_hello(handshake.encode(OWN)), Hello)
