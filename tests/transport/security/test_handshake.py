"""Every field that differs is named with both values; nothing that a peer sends makes the reader fail."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import msgspec
import pytest

from shardwise.errors import CompatibilityError, ManifestMismatch, ProtocolMismatch
from shardwise.transport.compatibility import HINT_OWN_STALE, HINT_PEER_STALE, RULES
from shardwise.transport.handshake import (
    MAX_HANDSHAKE_BYTES,
    Hello,
    Refused,
    Welcome,
    answer,
    encode,
    read_hello,
    read_reply,
)
from shardwise.transport.messages import PROTOCOL_VERSION

OWN = Hello(
    deployment="home",
    epoch=7,
    manifest_digest="aa" * 32,
    revision_digest="bb" * 32,
    tokenizer_digest="cc" * 32,
    quantization_digest="dd" * 32,
    quantization="Q4_1",
    layers=((0, 10), (10, 30)),
    wire_dtype="f16",
    context_tokens=2048,
    kv_type="f16",
    backend="llama.cpp 0.3.36 openblas",
    platform="Linux x86_64",
    shardwise_version="0.1.0",
)
OTHER: dict[str, Any] = {
    "deployment": "office",
    "epoch": 6,
    "manifest_digest": "a0" * 32,
    "revision_digest": "b0" * 32,
    "tokenizer_digest": "c0" * 32,
    "quantization_digest": "d0" * 32,
    "quantization": "Q8_0",
    "layers": ((0, 12), (12, 30)),
    "wire_dtype": "f32",
    "context_tokens": 4096,
    "kv_type": "q8_0",
    "backend": "llama.cpp 0.3.35",
    "device": "cuda",
    "shardwise_version": "0.2.0",
    "platform": "Darwin arm64",
    "node": "nas",
    "stage": 1,
}
SHOWN = {"layers": ("0-12 12-30", "0-10 10-30")}


def changed(**values: Any) -> Hello:
    return msgspec.structs.replace(OWN, **values)


def test_every_field_has_exactly_one_rule() -> None:
    assert sorted(rule.field for rule in RULES) == sorted(Hello.__struct_fields__)
    assert set(OTHER) | {"protocol_version"} == set(Hello.__struct_fields__)


def test_equal_peers_are_welcome() -> None:
    assert answer(OWN, OWN) == Welcome(hello=OWN)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.field != "protocol_version"], ids=lambda rule: rule.field)
def test_each_difference_is_judged_by_its_rule(rule: Any) -> None:
    reply = answer(changed(**{rule.field: OTHER[rule.field]}), OWN)
    peer, own = SHOWN.get(rule.field, (str(OTHER[rule.field]), str(getattr(OWN, rule.field)) or "none"))
    if rule.kind == "told":
        assert isinstance(reply, Welcome)
        (difference,) = reply.told
    else:
        assert isinstance(reply, Refused)
        (difference,) = reply.differences
        error = reply.error(where="tcp://nas:7070")
        assert isinstance(error, ManifestMismatch)
        assert error.exit_code == 4
        assert peer in str(error)
        assert own in str(error)
        assert error.hint
    assert (difference.field, difference.peer, difference.own) == (rule.field, peer, own)


def test_all_differences_are_listed_and_the_cause_comes_first() -> None:
    reply = answer(changed(tokenizer_digest="c0" * 32, manifest_digest="a0" * 32), OWN)
    assert isinstance(reply, Refused)
    assert [d.field for d in reply.differences] == ["tokenizer_digest", "manifest_digest"]


def test_epochs_fence_both_ways() -> None:
    stale, newer = answer(changed(epoch=6), OWN), answer(changed(epoch=8), OWN)
    assert isinstance(stale, Refused)
    assert isinstance(newer, Refused)
    assert stale.differences[0].hint == HINT_PEER_STALE
    assert newer.differences[0].hint == HINT_OWN_STALE


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, 99, -5])
def test_older_and_newer_protocols_are_named_even_with_unknown_fields(version: int) -> None:
    data = msgspec.msgpack.encode({"t": "hello", "protocol_version": version, "something_new": [1, 2], "layers": "all"})
    reply = read_hello(data)
    assert isinstance(reply, Refused)
    error = reply.error()
    assert isinstance(error, ProtocolMismatch)
    assert f"the peer has {version}, here it is {PROTOCOL_VERSION}" in str(error)


def test_hello_round_trip() -> None:
    assert read_hello(encode(OWN)) == OWN


def test_the_refused_side_sees_the_values_from_its_own_side() -> None:
    reply = answer(changed(wire_dtype="f32"), OWN)
    with pytest.raises(ManifestMismatch, match="the peer has f16, here it is f32"):
        read_reply(encode(reply))
    stale = answer(changed(epoch=6), OWN)
    with pytest.raises(ManifestMismatch) as caught:
        read_reply(encode(stale))
    assert caught.value.hint == HINT_OWN_STALE


def test_welcome_round_trip_and_a_welcome_of_another_version() -> None:
    assert read_reply(encode(answer(OWN, OWN))).hello == OWN
    data = msgspec.msgpack.encode({"t": "welcome", "protocol_version": PROTOCOL_VERSION + 1, "news": True})
    with pytest.raises(ProtocolMismatch, match=f"the peer has {PROTOCOL_VERSION + 1}, here it is {PROTOCOL_VERSION}"):
        read_reply(data)


def test_text_from_a_peer_is_made_printable_and_short() -> None:
    reply = answer(changed(backend="\x1b[31m" + "x" * 5000, node="\n"), OWN)
    assert isinstance(reply, Refused)
    shown = reply.differences[0].peer
    assert "\x1b" not in shown
    assert len(shown) <= 200


def test_a_long_hello_is_refused_before_it_is_decoded() -> None:
    reply = read_hello(bytes(MAX_HANDSHAKE_BYTES + 1))
    assert isinstance(reply, Refused)


def mutate(data: bytes, random_source: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(random_source.randint(1, 4)):
        action = random_source.randrange(4)
        at = random_source.randrange(len(out)) if out else 0
        if action == 0 and out:
            out[at] ^= 1 << random_source.randrange(8)
        elif action == 1:
            out[at:at] = random_source.randbytes(random_source.randint(1, 9))
        elif action == 2:
            del out[at : at + random_source.randint(1, 9)]
        else:
            out[at:] = random_source.randbytes(random_source.randint(0, 30))
    return bytes(out)


def fuzz(num_messages: int) -> None:
    random_source = random.Random(4)
    seeds = [encode(OWN), encode(answer(OWN, OWN)), encode(answer(changed(epoch=1), OWN)), b"", b"\xc1", b"\xdd\xff\xff\xff\xff"]
    for _ in range(num_messages):
        data = mutate(random_source.choice(seeds), random_source)
        hello = read_hello(data)
        if isinstance(hello, Hello):
            assert isinstance(answer(hello, OWN), Welcome | Refused)
        with contextlib.suppress(CompatibilityError):
            read_reply(data)


def test_fuzzed_messages_are_refused_never_a_crash() -> None:
    fuzz(20_000)


@pytest.mark.soak
def test_a_million_fuzzed_handshakes() -> None:
    fuzz(1_000_000)
