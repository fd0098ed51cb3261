"""What nodes, the coordinator and the command line say to each other: strict MessagePack over CURVE.

    joiner (with the invite's key) -> JoinRequest -> JoinGranted | Failed
    node                           -> Beat, Goodbye, DrainRequest -> BeatAnswer, Done
    anyone allowed                 -> ListRequest -> NodeList
    the coordinator's own key      -> InviteRequest, RevokeRequest, DrainRequest, StopRequest

**Fails when** bytes are none of these (`ProtocolMismatch`). Times of other machines appear only to be shown.
"""

from __future__ import annotations

import msgspec

from shardwise.cluster.membership import Member, NodeState
from shardwise.cluster.ray_engine.tls import TlsMaterial
from shardwise.errors import ProtocolMismatch, ShardwiseError, from_record
from shardwise.records import Record

MAX_CONTROL_BYTES = 512 * 1024  # 1,000 nodes fit
CONTROL_VERSION = 1


class NodeCard(Record):
    """What a machine says about itself when it joins and beats."""

    public: str  # its key
    name: str
    address: str  # under which the others reach it
    python: str
    ray: str
    shardwise: str
    llama: str
    platform: str
    memory_bytes: int  # what a model may use
    num_cores: int = 0
    wall_s: float = 0.0  # its clock, to show skew


class Control(Record, tag_field="c"):
    """Base of all messages."""


class JoinRequest(Control, tag="join"):
    """May I? Sent with the invite's key; `card.public` is the node's own."""

    card: NodeCard
    version: int = CONTROL_VERSION


class JoinGranted(Control, tag="granted"):
    """Everything that a node needs."""

    cluster_id: str
    cluster_name: str
    name: str  # perhaps with a number
    coordinator_public: str
    coordinator_addresses: tuple[str, ...]
    ray_head: str
    ray_token: str
    beat_every_s: float
    tls: TlsMaterial | None = None  # for Ray's traffic


class Beat(Control, tag="beat"):
    """A sign of life."""

    card: NodeCard
    raylet_alive: bool
    raylet_start: int = 0  # which one: Ray's head knows it by this
    incarnation: int = 0
    tls_address: str = ""  # for which it has a certificate


class BeatAnswer(Control, tag="beaten"):
    """What the coordinator wants the node to know."""

    name: str
    state: NodeState
    incarnation: int
    ray_head: str
    ray_token: str
    closing: bool = False  # the cluster goes down: end
    tls: TlsMaterial | None = None  # a certificate for the node's new address
    head_start: int = 0  # which start of Ray's head it is: a new one knows nothing of raylets that joined an old one
    raylet_lost: bool = False  # the head answers, and does not have the node's raylet


class Goodbye(Control, tag="bye"):
    """The node leaves, or sleeps and will be back."""

    asleep: bool


class DrainRequest(Control, tag="drain"):
    """Give a node nothing new; "" = the sender."""

    name: str = ""


class ListRequest(Control, tag="list"):
    """Who is there?"""


class ShownNode(Record):
    """A member with what it said about itself."""

    member: Member
    card: NodeCard
    coordinator: bool = False
    silent_s: float = 0.0
    clock_skew_s: float = 0.0


class NodeList(Control, tag="nodes"):
    cluster_id: str
    cluster_name: str
    nodes: tuple[ShownNode, ...]


class InviteRequest(Control, tag="invite"):
    valid_s: float


class InviteMade(Control, tag="invited"):
    invite: str


class RevokeRequest(Control, tag="revoke"):
    name: str


class StopRequest(Control, tag="stop"):
    """End this daemon; a coordinator takes the cluster down."""

    goodbye: bool = True
    asleep: bool = False


class Done(Control, tag="done"):
    pass


class Failed(Control, tag="failed"):
    """An error as plain data."""

    kind: str
    message: str
    where: str = ""
    hint: str = ""

    @classmethod
    def of(cls, error: ShardwiseError) -> Failed:
        return cls(kind=type(error).__name__, message=error.message, where=error.where, hint=error.hint)

    def error(self) -> ShardwiseError:
        return from_record(self.kind, self.message, self.where, self.hint)


Request = JoinRequest | Beat | Goodbye | DrainRequest | ListRequest | InviteRequest | RevokeRequest | StopRequest
Reply = JoinGranted | BeatAnswer | NodeList | InviteMade | Done | Failed

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_UNREADABLE = (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError, OverflowError)
_HINT = "install the same shardwise on both machines"


def encode(message: Request | Reply) -> bytes:
    return _encoder.encode(message)


def decode_request(data: bytes | memoryview) -> Request:
    """Strict; `ProtocolMismatch` for anything else."""
    try:
        return _requests.decode(_sized(data))
    except _UNREADABLE as error:
        raise ProtocolMismatch(f"not a control message: {error}", hint=_HINT) from error


def decode_reply(data: bytes | memoryview) -> Reply:
    """Strict; `ProtocolMismatch` for anything else."""
    try:
        return _replies.decode(_sized(data))
    except _UNREADABLE as error:
        raise ProtocolMismatch(f"not an answer to a control message: {error}", hint=_HINT) from error


def _sized(data: bytes | memoryview) -> bytes | memoryview:
    if len(data) > MAX_CONTROL_BYTES:
        raise ProtocolMismatch(f"a control message of {len(data)} bytes", hint=f"at most {MAX_CONTROL_BYTES} are allowed")
    return data
