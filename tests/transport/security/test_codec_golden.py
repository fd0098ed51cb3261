"""Golden bytes of every message of a protocol version, and a fuzzed codec.

If this fails because a message changed: peers of this version no longer understand each other. Raise `PROTOCOL_VERSION` (or
undo the change), then write the new file with `python -m tests.transport.security.test_codec_golden`.
"""

from __future__ import annotations

import contextlib
import json
import random
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardwise.errors import ProtocolMismatch
from shardwise.transport import handshake
from shardwise.transport.messages import MAX_HEADER_BYTES, PROTOCOL_VERSION, AnyMessage, decode, encode
from tests.transport.security.test_handshake import OWN, changed, mutate

GOLDEN = Path(__file__).with_name(f"golden_v{PROTOCOL_VERSION}.json")


def sample_value(kind: Any, name: str) -> Any:
    """A fixed value of a type, never a default: every field is written."""
    if isinstance(kind, types.UnionType):
        return sample_value(next(k for k in typing.get_args(kind) if k is not types.NoneType), name)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        inner = arguments[:1] * 2 if len(arguments) == 2 and arguments[1] is Ellipsis else arguments
        return tuple(sample_value(argument, name) for argument in inner)
    if origin is dict:
        return {"key": 7}
    simple = {bool: True, int: 300 + len(name), float: 0.5 + len(name), str: f"<{name}>"}
    return simple[kind] if kind in simple else sample(kind)


def sample(kind: Any) -> Any:
    """A record with every field set."""
    hints = typing.get_type_hints(kind)
    return kind(**{field.name: sample_value(hints[field.name], field.name) for field in msgspec.structs.fields(kind)})


def current() -> dict[str, str]:
    """Name -> bytes in hexadecimal."""
    out = {kind.__name__: encode(sample(kind)).hex() for kind in typing.get_args(AnyMessage)}
    out["Hello"] = handshake.encode(OWN).hex()
    out["Welcome"] = handshake.encode(handshake.answer(changed(node="nas"), OWN)).hex()
    out["Refused"] = handshake.encode(handshake.answer(changed(wire_dtype="f32"), OWN)).hex()
    return out


def test_bytes_are_those_of_this_protocol_version() -> None:
    assert current() == json.loads(GOLDEN.read_text())


def test_golden_bytes_are_understood() -> None:
    for name, data in json.loads(GOLDEN.read_text()).items():
        if name in ("Hello", "Welcome", "Refused"):
            continue
        message = decode(bytes.fromhex(data))
        assert type(message).__name__ == name
        assert message == sample(type(message))
    assert handshake.read_hello(bytes.fromhex(current()["Hello"])) == OWN


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0",
        b"\x80",
        msgspec.msgpack.encode({"t": "nothing"}),
        msgspec.msgpack.encode({"t": "ping", "sequence": 1, "sent_s": 0.0, "extra": 1}),
        msgspec.msgpack.encode({"t": "ping", "sequence": "1", "sent_s": 0.0}),
        msgspec.msgpack.encode({"t": "ping"}),
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\x81\xa1t\xdb\xff\xff\xff\xff",
        bytes(MAX_HEADER_BYTES + 1),
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolMismatch):
        decode(data)


def fuzz(num_messages: int) -> None:
    source = random.Random(9)
    seeds = [bytes.fromhex(data) for data in current().values()]
    for _ in range(num_messages):
        with contextlib.suppress(ProtocolMismatch):
            decode(mutate(source.choice(seeds), source))


def test_fuzzed_messages() -> None:
    fuzz(20_000)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_million_fuzzed_messages() -> None:
    fuzz(1_000_000)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(current(), indent=1, sort_keys=True) + "\n")
