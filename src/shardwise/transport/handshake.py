"""Same model, tokenizer, quantization, split, libraries and epoch, or a refusal that says what differs. No I/O.

    peer's bytes -> read_hello -> Hello   -> answer(hello, own) -> Welcome | Refused -> encode -> to the peer
                              \\-> Refused (not readable, or another protocol version)
    peer's bytes -> read_reply -> Welcome, or raises what a Refused says

**Promises** any difference that is not allowed by the table in `compatibility` gives `Refused` with the field, both sides' values
and what to do; bytes that are no `Hello` give `Refused` as well, never an exception; equal input gives equal output.
**Fails when** a reply is not readable (`ProtocolMismatch`). **Called by** the channel, the stage worker and the driver.
"""

from __future__ import annotations

import platform
from typing import Any

import msgspec

import shardwise
from shardwise.errors import CompatibilityError, ManifestMismatch, ProtocolMismatch
from shardwise.records import Record, plain
from shardwise.transport.compatibility import HINT_OWN_STALE, HINT_PEER_STALE, RULES, Rule
from shardwise.transport.messages import PROTOCOL_VERSION
from shardwise.transport.security.allow_list import AllowedKey

MAX_HANDSHAKE_BYTES = 64 * 1024  # 1000 stages fit
REPLICA_STAGE = 1_000_000  # `Hello.stage` of a worker that stands by as a stage's replica is this much higher
_MAX_SHOWN = 200  # characters of a peer's value in a message


class Hello(Record, tag="hello", tag_field="t"):
    """What one peer holds and speaks. The tag `t` and `protocol_version` keep their names in every protocol version."""

    protocol_version: int = PROTOCOL_VERSION
    deployment: str  # name of the deployment
    epoch: int  # of the deployment; every launch has a higher one
    manifest_digest: str
    revision_digest: str
    tokenizer_digest: str
    quantization_digest: str  # over every tensor's type
    quantization: str  # the label people use
    layers: tuple[tuple[int, int], ...]  # of all stages, in order: [start, end)
    wire_dtype: str
    context_tokens: int
    kv_type: str
    backend: str  # library, version and build: "llama.cpp 0.3.36 openblas"
    device: str = "cpu"
    shardwise_version: str = shardwise.__version__
    platform: str = f"{platform.system()} {platform.machine()}"
    node: str = ""
    stage: int = -1  # which one this peer is; -1 = the driver


class Difference(Record):
    """One field on which two peers do not agree."""

    field: str
    name: str
    peer: str  # the value of the side that said hello
    own: str  # the value of the side that answers
    hint: str = ""

    def sentence(self) -> str:
        return f"{self.name} differs: the peer has {self.peer}, here it is {self.own}"


class Welcome(Record, tag="welcome", tag_field="t"):
    """Go on. `told` are the differences that are allowed."""

    protocol_version: int = PROTOCOL_VERSION
    hello: Hello  # the answering side's
    told: tuple[Difference, ...] = ()


class Refused(Record, tag="refused", tag_field="t"):
    """Nothing is served; every reason is listed."""

    protocol_version: int = PROTOCOL_VERSION
    differences: tuple[Difference, ...]

    def error(self, *, where: str = "") -> CompatibilityError:
        """The refusal as an exception; exit code 4."""
        first = self.differences[0]
        kind = ProtocolMismatch if any(d.field == "protocol_version" for d in self.differences) else ManifestMismatch
        message = "; ".join(d.sentence() for d in self.differences)
        return kind(message, where=where, hint=first.hint, differences=[plain(d) for d in self.differences])


class _Version(msgspec.Struct):
    """All that can be read of a message of any protocol version."""

    t: str = ""
    protocol_version: int = -1


_encoder = msgspec.msgpack.Encoder()
_hello: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)
_reply: msgspec.msgpack.Decoder[Welcome | Refused] = msgspec.msgpack.Decoder(Welcome | Refused)
_version = msgspec.msgpack.Decoder(_Version)
_UNREADABLE = (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError, OverflowError)


def encode(message: Hello | Welcome | Refused) -> bytes:
    """MessagePack, at most `MAX_HANDSHAKE_BYTES`."""
    return _encoder.encode(message)


def answer(hello: Hello, own: Hello) -> Welcome | Refused:
    """Compare two peers by the table. Pure."""
    refusing: list[Difference] = []
    told: list[Difference] = []
    for rule in RULES:
        peer_value, own_value = getattr(hello, rule.field), getattr(own, rule.field)
        if peer_value != own_value:
            found = _difference(rule, peer_value, own_value)
            (told if rule.kind == "told" else refusing).append(found)
    return Refused(differences=tuple(refusing)) if refusing else Welcome(hello=own, told=tuple(told))


def refuse_impostor(hello: Hello, entry: AllowedKey | None) -> Refused | None:
    """A key that was allowed as `driver` or `stage-2` may say hello as that (or its replica) only; other names may be any."""
    name = entry.name if entry is not None else "nobody"
    claimed = "driver" if hello.stage < 0 else f"stage-{hello.stage % REPLICA_STAGE}"
    if name == claimed or not (name in ("driver", "nobody") or name.startswith("stage-")):
        return None
    hint = "use the key that this deployment gave to that stage"
    return Refused(differences=(Difference(field="stage", name="stage of this key", peer=claimed, own=name, hint=hint),))


def is_hello(data: bytes | memoryview) -> bool:
    """Whether this is a hello of any protocol version, or so broken that it must be answered like one."""
    return _tag(data) in ("hello", None)


def is_reply(data: bytes | memoryview) -> bool:
    """Whether this is an answer to a hello, of any protocol version."""
    return _tag(data) in ("welcome", "refused")


def _tag(data: bytes | memoryview) -> str | None:
    """The tag of a message of any kind; None where it cannot be read."""
    try:
        return _version.decode(data).t
    except _UNREADABLE:
        return None


def read_hello(data: bytes | memoryview) -> Hello | Refused:
    """Decode a peer's first message; another protocol version or anything unreadable becomes `Refused`."""
    if len(data) > MAX_HANDSHAKE_BYTES:
        return _unreadable(f"a message of {len(data)} bytes", f"a hello of at most {MAX_HANDSHAKE_BYTES} bytes")
    try:
        version = _version.decode(data)
    except _UNREADABLE:
        return _unreadable("something that is no shardwise message", f"version {PROTOCOL_VERSION}")
    if version.t != "hello":
        return _unreadable("something that is no hello", f"version {PROTOCOL_VERSION}")
    if version.protocol_version != PROTOCOL_VERSION:
        return _unreadable(_show(version.protocol_version), str(PROTOCOL_VERSION))
    try:
        return _hello.decode(data)
    except _UNREADABLE as error:
        return _unreadable(f"a hello that is not of version {PROTOCOL_VERSION} ({error})", f"version {PROTOCOL_VERSION}")


def read_reply(data: bytes | memoryview, *, where: str = "") -> Welcome:
    """Decode the answer to our hello; raises `ProtocolMismatch` or `ManifestMismatch` with every difference."""
    try:
        if len(data) > 2 * MAX_HANDSHAKE_BYTES:
            raise ProtocolMismatch(f"a reply of {len(data)} bytes", where=where, hint=_hint_protocol())
        version = _version.decode(data)
        if version.protocol_version != PROTOCOL_VERSION and version.t == "welcome":
            raise _unreadable(_show(version.protocol_version), str(PROTOCOL_VERSION)).error(where=where)
        reply = _reply.decode(data)
    except _UNREADABLE as error:
        raise ProtocolMismatch(f"the peer's reply is not readable: {error}", where=where, hint=_hint_protocol()) from error
    if isinstance(reply, Refused):
        raise _seen_from_here(reply).error(where=where)
    return reply


def _seen_from_here(refused: Refused) -> Refused:
    """A refusal that a peer sent, with `peer` and `own` swapped: to the reader, the sender is the peer."""
    if not refused.differences:
        return _unreadable("refused without a reason", f"version {PROTOCOL_VERSION}")
    swapped = []
    for d in refused.differences:
        hint = {HINT_PEER_STALE: HINT_OWN_STALE, HINT_OWN_STALE: HINT_PEER_STALE}.get(d.hint, d.hint)
        swapped.append(Difference(field=d.field, name=d.name, peer=d.own, own=d.peer, hint=hint))
    return Refused(differences=tuple(swapped))


def _difference(rule: Rule, peer_value: Any, own_value: Any) -> Difference:
    hint = rule.hint
    if rule.kind == "epoch":
        hint = HINT_PEER_STALE if peer_value < own_value else HINT_OWN_STALE
    return Difference(field=rule.field, name=rule.name, peer=_show(peer_value), own=_show(own_value), hint=hint)


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(f"{start}-{end}" for start, end in value)[:_MAX_SHOWN] or "none"
    text = str(value)
    # A peer's text goes into logs and terminals: printable and short.
    return "".join(c if c.isprintable() else "?" for c in text)[:_MAX_SHOWN] or "none"


def _hint_protocol() -> str:
    return next(rule.hint for rule in RULES if rule.field == "protocol_version")


def _unreadable(peer: str, own: str) -> Refused:
    found = Difference(field="protocol_version", name="protocol version", peer=_show(peer), own=own, hint=_hint_protocol())
    return Refused(differences=(found,))
