"""A real worker process against messages that are well-formed and senseless, damaged, or both: it neither ends nor hangs.

The sender is a member (it has the driver's key): strangers do not get this far, see `test_strangers` and `test_channel`.
"""

from __future__ import annotations

import random
import time
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from shardwise.errors import ProtocolMismatch
from shardwise.records import replace
from shardwise.shards.manifest import ManifestSettings
from shardwise.shards.packing import pack_model
from shardwise.transport.channel import DRIVER, Outbox
from shardwise.transport.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    CloseSession,
    Connect,
    Connected,
    ExportKv,
    KvState,
    NewEpoch,
    OpenSession,
    Progress,
    ProgressRequest,
    Ready,
    Sampled,
    SamplingSettings,
    Segment,
    Shutdown,
    Step,
    decode,
    encode,
)
from tests.shards.conftest import VOCAB, write_tiny_model
from tests.transport.security.test_handshake import mutate
from tests.transport.security.test_refusals import Deployment, end, start

ORDERS = (Shutdown, Connect, NewEpoch)  # what a driver may do to a worker: end it, rewire it
SETTINGS = ManifestSettings(protocol_version=PROTOCOL_VERSION, wire_dtype="f32", context_tokens=128)
KINDS = [kind for kind in typing.get_args(AnyMessage) if kind not in ORDERS]
SESSION = 4242
NUMBERS = [0, 1, 2, 3, 5, 7, 64, 127, 128, 129, -1, -2, VOCAB - 1, VOCAB, 2**31 - 1, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64 - 1]
FLOATS = [0.0, 1.0, -1.0, 0.5, 1e300, -1e300, float("inf"), float("-inf"), float("nan"), 1e-300]
TEXTS = ["", "f32", "f16", "q8_0", "x" * 300, "\0", "root ::= [a-z]+", "../../etc/passwd", "0" * 64]


def any_value(kind: Any, source: random.Random) -> Any:
    """A random value of a type."""
    if isinstance(kind, types.UnionType):
        return any_value(source.choice(typing.get_args(kind)), source)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(any_value(arguments[0], source) for _ in range(source.choice((0, 1, 1, 2, 3, 40))))
        return tuple(any_value(argument, source) for argument in arguments)
    if origin is dict:
        return {any_value(arguments[0], source): any_value(arguments[1], source) for _ in range(source.randrange(3))}
    if kind is bool:
        return source.random() < 0.5
    if kind is int:
        return source.choice(NUMBERS) if source.random() < 0.8 else source.randrange(VOCAB)
    if kind is float:
        return source.choice(FLOATS)
    if kind is str:
        return source.choice(TEXTS)
    if kind is types.NoneType:
        return None
    return any_record(kind, source)


def any_record(kind: Any, source: random.Random) -> Any:
    hints = typing.get_type_hints(kind)
    values = {}
    for field in msgspec.structs.fields(kind):
        if field.name in ("session", "epoch") and source.random() < 0.7:
            values[field.name] = {"session": SESSION, "epoch": source.choice((0, 1, 2))}[field.name]
        elif field.required or source.random() < 0.5:
            values[field.name] = any_value(hints[field.name], source)
    return kind(**values)


def is_order(data: bytes) -> bool:
    try:
        return isinstance(decode(data), ORDERS)
    except ProtocolMismatch:
        return False


def nearly_valid(number: int, source: random.Random) -> AnyMessage:
    """A message that fits the session that is open, but for one or two fields."""
    segment = Segment(session=SESSION, epoch=number // 8, position=source.randrange(6), num_tokens=1, sample=True)
    message: AnyMessage = source.choice(
        [
            OpenSession(session=SESSION, epoch=number // 8, tokens=(1, 5, 9, 13), num_prompt=4, max_tokens=3),
            Step(segments=(segment,), dtype="f32", hidden=32, sent_s=0.0),
            Sampled(session=SESSION, epoch=number // 8, position=source.randrange(6), token=7),
            ExportKv(session=SESSION, epoch=number // 8, request=1),
            KvState(session=SESSION, epoch=number // 8, stage=0, request=1, num_tokens=4, digest="0" * 64),
            CloseSession(session=SESSION, epoch=number // 8),
        ]
    )
    hints = typing.get_type_hints(type(message))
    names = [field.name for field in msgspec.structs.fields(type(message)) if field.name not in ("session", "epoch")]
    for name in source.sample(names, min(len(names), source.choice((0, 1, 1, 2)))):
        message = replace(message, **{name: any_value(hints[name], source)})
    return message


class Target:
    """A worker that holds the whole tiny model, and a driver's connection to it."""

    def __init__(self, context: zmq.Context, directory: Path) -> None:
        model = write_tiny_model(directory / "tiny.gguf")
        manifest = pack_model(model, [30], directory / "out", SETTINGS)
        self.deployment = Deployment(context, directory / "out", manifest)
        told = self.deployment.config(replace(manifest, stages=(manifest.stages[0],) * 2), directory / "out")
        order = told.order
        assert order is not None
        config = replace(told, stage=0, num_stages=1, order=replace(order, manifest=manifest), hello=replace(told.hello, stage=0))
        self.deployment.inbox._allowed = None  # the key was made for stage 1
        self.child = start(config)
        ready = self.wait_for(Ready, 60)
        self.outbox = Outbox(
            context, ready.address, replace(self.deployment.hello, stage=DRIVER), self.deployment.keys, ready.public_key
        )
        self.outbox.send(Connect(epoch=self.deployment.hello.epoch, next_address="", first_address=""))
        self.wait_for(Connected, 30)

    def wait_for(self, kind: type[Any], timeout_s: float) -> Any:
        deadline_s = time.perf_counter() + timeout_s
        while time.perf_counter() < deadline_s:
            assert self.child.poll() is None, self.said()
            self.deployment.inbox.wait(0.05)
            envelope = self.deployment.inbox.receive()
            if envelope is not None and isinstance(envelope.message, kind):
                return envelope.message
        raise AssertionError(f"no {kind.__name__} within {timeout_s} s")

    def said(self) -> str:
        assert self.child.stderr is not None
        return self.child.stderr.read().decode()[-3000:]

    def drain(self) -> None:
        """Read what the worker says, so that its queue does not fill."""
        while self.deployment.inbox.wait(0):
            self.deployment.inbox.receive()
        while self.outbox.socket.poll(0):
            self.outbox.socket.recv()

    def generate(self, session: int) -> list[int]:
        """A few greedy tokens of a fixed prompt."""
        self.outbox.send(
            OpenSession(session=session, epoch=0, tokens=(1, 5, 9, 13), num_prompt=4, max_tokens=4, sampling=SamplingSettings())
        )
        tokens = [self.next_token(session) for _ in range(4)]
        self.outbox.send(CloseSession(session=session, epoch=2**62))
        return tokens

    def next_token(self, session: int) -> int:
        while True:
            sampled = self.wait_for(Sampled, 60)
            if sampled.session == session:
                return int(sampled.token)

    def close_sessions(self) -> None:
        """Ask which sessions are open (damaged messages may have opened any number) and close them."""
        self.outbox.send(ProgressRequest(sequence=1))
        for session, _ in self.wait_for(Progress, 60).positions:
            self.outbox.send(CloseSession(session=session, epoch=2**63 - 1))
        self.drain()

    def close(self) -> None:
        end(self.child)
        self.outbox.close(linger_ms=0)
        self.deployment.close()


@pytest.fixture
def target(context: zmq.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    monkeypatch.setenv("SHARDWISE_STATE", str(tmp_path / "state"))
    made = Target(context, tmp_path)
    yield made
    made.close()


def attack(target: Target, num_messages: int, seed: int = 3) -> None:
    source = random.Random(seed)
    expected = target.generate(1)
    for number in range(num_messages):
        nearly = source.random() < 0.7
        data = encode(nearly_valid(number, source) if nearly else any_record(source.choice(KINDS), source))
        if source.random() < 0.3:
            data = mutate(data, source)
        if is_order(data):
            continue
        frames = [data] + [source.randbytes(source.choice((0, 4, 128, 1000))) for _ in range(source.choice((0, 0, 1, 2)))]
        target.outbox.socket.send_multipart(frames)
        if number % 100 == 99:
            target.drain()
            assert target.child.poll() is None, target.said()
            target.close_sessions()
    target.outbox.greet(replace(target.deployment.hello, stage=DRIVER))
    target.close_sessions()
    assert target.generate(777_001) == expected


def test_senseless_and_damaged_messages(target: Target) -> None:
    attack(target, 3_000)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_million_senseless_and_damaged_messages(target: Target) -> None:
    attack(target, 1_000_000)
