"""What the probe's driver and its workers say to each other. Workers ask, the driver answers with orders.

worker: Here (I am up, this is my echo) -> Idle -> ... driver: Wait | MeasureNode | MeasureLink | End
worker: Progress, NodeDone, LinkDone, OrderFailed
"""

from __future__ import annotations

import msgspec

from shardwise.cluster.control import MAX_CONTROL_BYTES
from shardwise.cluster.control_link import Codec
from shardwise.errors import ProtocolMismatch, ShardwiseError, from_record
from shardwise.probe.link_task import LinkReport, LinkSettings, LinkTarget
from shardwise.probe.node import NodeReport, NodeSettings
from shardwise.records import Record


class Message(Record, tag_field="p"):
    """Base of all messages."""


class Here(Message, tag="here"):
    """A worker is up; its echo listens."""

    name: str
    machine: str  # workers on one machine measure one after the other
    card: str  # network card of its address
    echo: LinkTarget


class Idle(Message, tag="idle"):
    name: str


class Progress(Message, tag="progress"):
    name: str
    what: str
    share: float


class NodeDone(Message, tag="node"):
    report: NodeReport


class LinkDone(Message, tag="link"):
    report: LinkReport


class OrderFailed(Message, tag="failed"):
    name: str
    kind: str
    message: str
    where: str = ""
    hint: str = ""


class Wait(Message, tag="wait"):
    pass


class MeasureNode(Message, tag="measure node"):
    settings: NodeSettings


class MeasureLink(Message, tag="measure link"):
    target: LinkTarget
    kind: str
    settings: LinkSettings


class End(Message, tag="end"):
    pass


class Refusal(Message, tag="refusal"):
    kind: str
    message: str
    where: str = ""
    hint: str = ""


Request = Here | Idle | Progress | NodeDone | LinkDone | OrderFailed
Order = Wait | MeasureNode | MeasureLink | End | Refusal
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


def _decode_request(data: bytes | memoryview) -> Request:
    try:
        return _requests.decode(_sized(data))
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolMismatch(f"not a message of a probe worker: {error}") from error


def _decode_order(data: bytes | memoryview) -> Order:
    try:
        return _orders.decode(_sized(data))
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolMismatch(f"not an order of a probe: {error}") from error


def _sized(data: bytes | memoryview) -> bytes | memoryview:
    if len(data) > MAX_CONTROL_BYTES:
        raise ProtocolMismatch(f"a probe message of {len(data)} bytes", hint=f"at most {MAX_CONTROL_BYTES} are allowed")
    return data


def _refusal(error: ShardwiseError) -> Order:
    return Refusal(kind=type(error).__name__, message=error.message, where=error.where, hint=error.hint)


def _error(order: Order) -> ShardwiseError | None:
    return from_record(order.kind, order.message, order.where, order.hint) if isinstance(order, Refusal) else None


CODEC: Codec[Request, Order] = Codec(_encoder.encode, _decode_request, _decode_order, _refusal, _error)
