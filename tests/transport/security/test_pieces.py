"""Pieces over real, encrypted connections: identical, resumed after the server dies, closed to everybody else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from shardwise.errors import AuthenticationFailed, CorruptWeightsError, NetworkError, ReplyTimeout
from shardwise.shards.packing import Packing, make_manifest
from shardwise.shards.pieces import pieces_of_packing
from shardwise.shards.store import ShardStore
from shardwise.shards.verify import verify_stage
from shardwise.transport.pieces import MAX_READ_BYTES, PeerPieces, PieceServer
from shardwise.transport.security import AllowList, Authenticator, NodeKeys, secure_client
from tests.shards.conftest import SETTINGS, write_tiny_model


@pytest.fixture(scope="module")
def packing(tmp_path_factory: pytest.TempPathFactory) -> Packing:
    return make_manifest(write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf"), [10, 12, 8], SETTINGS)


class Node:
    """Serves a packing."""

    def __init__(self, context: zmq.Context, packing: Packing) -> None:
        self.context = context
        self.keys = NodeKeys.generate()
        self.allowed = AllowList()
        self.authenticator = Authenticator(context, self.allowed)
        self.source = pieces_of_packing(packing)
        self.server = PieceServer(context, "tcp://127.0.0.1:*", lambda: self.source, keys=self.keys, allowed=self.allowed)

    def peer(self, name: str = "nas", *, timeout_s: float = 5.0, role: str = "node") -> PeerPieces:
        keys = NodeKeys.generate()
        self.allowed.allow(keys.public, name, role=role)
        return self.stranger(keys, timeout_s=timeout_s)

    def stranger(self, keys: NodeKeys, *, timeout_s: float = 2.0) -> PeerPieces:
        return PeerPieces(self.context, self.server.address, keys=keys, peer_public=self.keys.public, timeout_s=timeout_s)

    def close(self) -> None:
        self.server.close()
        self.authenticator.close()


@pytest.fixture
def node(context: zmq.Context, packing: Packing) -> Iterator[Node]:
    made = Node(context, packing)
    yield made
    made.close()


def test_a_slice_comes_over_the_wire(node: Node, packing: Packing, tmp_path: Path) -> None:
    stage = packing.manifest.stages[1]
    with node.peer() as peer:
        folder, report = ShardStore(tmp_path).fetch(stage, [peer])
    assert verify_stage(folder, stage) == []
    assert (
        node.server.sent_bytes == sum(report.bytes_by_source.values()) == sum(p.num_bytes for f in stage.files for p in f.pieces)
    )


def test_strangers_invites_and_revoked_nodes_get_nothing(node: Node, packing: Packing, tmp_path: Path) -> None:
    digest = packing.manifest.stages[0].files[0].pieces[0].sha256
    with node.stranger(NodeKeys.generate()) as stranger, pytest.raises(AuthenticationFailed):
        stranger.read(digest, 0, 1)
    with node.peer("invited", role="invite", timeout_s=0.3) as invited, pytest.raises(ReplyTimeout):
        invited.read(digest, 0, 1)
    with node.peer("nas", timeout_s=0.3) as nas:
        assert nas.read(digest, 0, 1)
        node.allowed.revoke("nas")
        with pytest.raises(NetworkError):
            nas.read(digest, 0, 1)
    assert node.server.sent_bytes == 1


@pytest.mark.parametrize(("offset", "size"), [(0, MAX_READ_BYTES + 1), (-1, 5), (10**15, 5), (0, 0), (0, -1), (0, 10**6)])
def test_reads_outside_a_piece_are_answered_with_a_refusal(node: Node, packing: Packing, offset: int, size: int) -> None:
    digest = packing.manifest.stages[0].files[0].pieces[0].sha256
    with node.peer() as peer, pytest.raises(CorruptWeightsError):
        peer.read(digest, offset, size)


def test_unknown_pieces(node: Node) -> None:
    with node.peer() as peer:
        assert peer.holds(["0" * 64, "../../etc/passwd"]) == set()
        with pytest.raises(CorruptWeightsError):
            peer.read("../../etc/passwd", 0, 10)


def test_garbage_is_answered_and_the_server_goes_on(node: Node, packing: Packing) -> None:
    keys = NodeKeys.generate()
    node.allowed.allow(keys.public, "odd")
    with node.context.socket(zmq.DEALER) as socket:
        secure_client(socket, keys, node.keys.public)
        socket.connect(node.server.address)
        for frames in ([b""], [b"\xc1garbage"], [msgspec.msgpack.encode({"t": "read?"})]):
            socket.send_multipart(frames)
            assert socket.poll(5000)
            socket.recv_multipart()
        socket.send_multipart([b"a", b"b", b"c"])
    with node.peer() as peer:
        assert peer.holds([packing.manifest.stages[0].files[0].pieces[0].sha256])
    assert node.server.num_dropped >= 4


def test_the_server_dies_and_another_takes_over(context: zmq.Context, packing: Packing, tmp_path: Path) -> None:
    """The transfer goes on where it was cut, with what another node has."""
    stage = packing.manifest.stages[1]
    first, second = Node(context, packing), None
    try:
        peer = first.peer(timeout_s=0.5)
        first.source = Dying(first)  # type: ignore[assignment]
        store = ShardStore(tmp_path)
        with peer, pytest.raises(NetworkError):
            store.fetch(stage, [peer])
        first.close()
        second = Node(context, packing)
        with second.peer() as other:
            folder, report = store.fetch(stage, [other])
        assert verify_stage(folder, stage) == []
        assert report.resumed_bytes > 0
    finally:
        (second or first).close()


class Dying:
    """Stops answering after some reads."""

    def __init__(self, node: Node) -> None:
        self.name, self.rank = "dying", 2
        self._source, self._left, self._node = node.source, 20, node
        self.holds = self._source.holds

    def read(self, digest: str, offset_bytes: int, num_bytes: int) -> bytes:
        self._left -= 1
        if self._left == 0:
            self._node.allowed.revoke("nas")
        return self._source.read(digest, offset_bytes, num_bytes)


def test_nobody_listens(context: zmq.Context) -> None:
    keys = NodeKeys.generate()
    peer = PeerPieces(context, "tcp://127.0.0.1:1", keys=keys, peer_public=keys.public, timeout_s=0.3)
    with peer, pytest.raises(NetworkError):
        peer.holds(["0" * 64])
