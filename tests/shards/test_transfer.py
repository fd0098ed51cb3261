"""Fetching: nearest first, resumed after any cut, never trusting anybody, and only what moved."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from shardwise.clock import ManualClock
from shardwise.errors import CorruptWeightsError, NetworkError, PeerClosed, UsageError
from shardwise.model import sample_path
from shardwise.records import to_json
from shardwise.shards.manifest import Manifest, StageSlice
from shardwise.shards.packing import Packing, make_manifest, pack_model
from shardwise.shards.pieces import PEER, LocalPieces, pieces_of_folder, pieces_of_model, pieces_of_packing
from shardwise.shards.progress import ProgressMeter, RateLimit, TransferProgress
from shardwise.shards.store import ShardStore
from shardwise.shards.transfer import CHUNK_BYTES, Transfer, TransferOptions, TransferReport
from shardwise.shards.verification import ensure_verified
from shardwise.shards.verify import paths_in, verify_stage
from tests.shards.conftest import SETTINGS

KEY = b"k" * 32
SMALL_READ = 512  # so that pieces of a tiny model take several reads


class Peer:
    """Hands out pieces as a peer would, counts what it sends, and can be cut off after so many bytes."""

    def __init__(self, pieces: LocalPieces, *, name: str = "peer", rank: int = PEER, cut_after: int | None = None) -> None:
        self.name, self.rank = name, rank
        self.sent: dict[str, int] = {}
        self.corrupt: set[str] = set()
        self._pieces = pieces
        self._left = cut_after
        self._lock = threading.Lock()

    @property
    def sent_bytes(self) -> int:
        return sum(self.sent.values())

    def holds(self, digests: Collection[str]) -> set[str]:
        return self._pieces.holds(digests)

    def read(self, digest: str, offset_bytes: int, num_bytes: int) -> bytes:
        data = self._pieces.read(digest, offset_bytes, num_bytes)
        with self._lock:
            if self._left is not None:
                if self._left < num_bytes:
                    self._left = 0
                    raise PeerClosed("the peer closed the connection", where=self.name)
                self._left -= num_bytes
            self.sent[digest] = self.sent.get(digest, 0) + num_bytes
        return bytes(b ^ 1 for b in data) if digest in self.corrupt else data


@pytest.fixture
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.shards.transfer.READ_BYTES", SMALL_READ)


@pytest.fixture(scope="module")
def packing(tiny: Path) -> Packing:
    return make_manifest(tiny, [10, 12, 8], SETTINGS)


def middle(packing: Packing) -> StageSlice:
    return packing.manifest.stages[1]


def check(folder: Path, stage: StageSlice) -> None:
    assert verify_stage(folder, stage) == []


# -- nearest first ----------------------------------------------------------------------------------------------


def test_a_fetched_slice_is_the_packed_one(tiny: Path, packing: Packing, tmp_path: Path) -> None:
    pack_model(tiny, [10, 12, 8], tmp_path / "packed", SETTINGS)
    store = ShardStore(tmp_path / "store")
    for stage in packing.manifest.stages:
        folder, _ = store.fetch(stage, [Peer(pieces_of_packing(packing))], key=KEY)
        for file in stage.files:
            assert (folder / file.name).read_bytes() == (tmp_path / "packed" / file.name).read_bytes()
        assert not ensure_verified(paths_in(folder, stage.files), stage, KEY, record_dir=folder)


def test_the_models_own_file_gives_the_weights_and_the_peer_only_headers(tiny: Path, packing: Packing, tmp_path: Path) -> None:
    peer = Peer(pieces_of_packing(packing))
    local = pieces_of_model(packing.manifest, [tiny])
    _, report = ShardStore(tmp_path).fetch(middle(packing), [peer, local])
    assert report.peer_weight_bytes <= 4 * 32  # the one-row embedding, which is made by slicing
    assert report.peer_header_bytes == sum(p.num_bytes for f in middle(packing).files for p in f.pieces if p.kind == "header")


def test_a_folder_is_asked_before_a_peer(tiny: Path, packing: Packing, tmp_path: Path) -> None:
    pack_model(tiny, [10, 12, 8], tmp_path / "nas", SETTINGS)
    peer = Peer(pieces_of_packing(packing))
    _, report = ShardStore(tmp_path / "store").fetch(middle(packing), [peer, pieces_of_folder(tmp_path / "nas")])
    assert peer.sent_bytes == 0
    assert report.bytes_by_source == {str(tmp_path / "nas"): sum(p.num_bytes for f in middle(packing).files for p in f.pieces)}


def test_starting_again_moves_nothing(packing: Packing, tmp_path: Path) -> None:
    store, peer = ShardStore(tmp_path), Peer(pieces_of_packing(packing))
    folder, _ = store.fetch(middle(packing), [peer])
    sent = peer.sent_bytes
    again, report = store.fetch(middle(packing), [])
    assert (again, peer.sent_bytes, report) == (folder, sent, TransferReport())


def layer_bytes(manifest: Manifest, layers: range) -> int:
    pieces = {p.origin: p for s in manifest.stages for f in s.files for p in f.pieces if p.origin.startswith("blk.")}
    return sum(p.num_bytes for name, p in pieces.items() if int(name.split(".")[1]) in layers)


def test_a_new_plan_moves_only_the_layers_that_moved(tiny: Path, packing: Packing, tmp_path: Path) -> None:
    """10+12+8 -> 10+15+5: three layers move to the second node, none to the third."""
    nodes = [ShardStore(tmp_path / str(i)) for i in range(3)]
    for store, stage in zip(nodes, packing.manifest.stages, strict=True):
        store.fetch(stage, [Peer(pieces_of_packing(packing))])
    moved = make_manifest(tiny, [10, 15, 5], SETTINGS)
    weights, headers = [], []
    for store, stage in zip(nodes, moved.manifest.stages, strict=True):
        folder, report = store.fetch(stage, [Peer(pieces_of_packing(moved))])
        check(folder, stage)
        weights.append(report.peer_weight_bytes)
        headers.append(report.peer_header_bytes)
    assert weights == [0, layer_bytes(moved.manifest, range(22, 25)), 0]
    assert headers[0] == 0
    assert max(headers) < 32 * 1024  # names and places of tensors; not the vocabulary


def test_pieces_come_from_several_peers(packing: Packing, tmp_path: Path) -> None:
    peers = [Peer(pieces_of_packing(packing), name=f"peer{i}") for i in range(3)]
    ShardStore(tmp_path).fetch(middle(packing), peers)
    assert all(peer.sent_bytes > 0.2 * sum(p.sent_bytes for p in peers) for peer in peers)


# -- cuts -------------------------------------------------------------------------------------------------------


def test_cut_at_a_hundred_random_points(packing: Packing, tmp_path: Path, small_reads: None) -> None:
    """The peer goes away after a random number of bytes, at least a hundred times, each transfer to its end."""
    source = random.Random(4)
    pieces = pieces_of_packing(packing)
    stage = middle(packing)
    total = sum(p.num_bytes for f in stage.files for p in f.pieces)
    store, peers, cuts = ShardStore(tmp_path), [], 0
    while cuts < 100:
        peers = []
        for _ in range(400):
            peer = Peer(pieces, cut_after=source.randrange(1, total // 8))
            peers.append(peer)
            try:
                folder, _ = store.fetch(stage, [peer], options=TransferOptions(num_readers=1))
                break
            except NetworkError:
                cuts += 1
        check(folder, stage)
        assert sum(p.sent_bytes for p in peers) == total  # not one byte twice
        store.discard(stage)


_CHILD = """
import sys, time
from pathlib import Path
from shardwise.records import from_json
from shardwise.shards.manifest import StageSlice
from shardwise.shards.pieces import PEER, pieces_of_folder
from shardwise.shards.store import ShardStore
store, folder, log = ShardStore(Path(sys.argv[1])), sys.argv[3], sys.argv[4]
stage = from_json(Path(sys.argv[2]).read_bytes(), StageSlice)
pieces = pieces_of_folder(Path(folder), rank=PEER)
out = open(log, "a", buffering=1)
class Counting:
    name, rank = "peer", PEER
    holds = staticmethod(pieces.holds)
    def read(self, digest, offset, size):
        out.write(f"{size}\\n")
        time.sleep(0.001)
        return pieces.read(digest, offset, size)
print("ready", flush=True)
store.fetch(stage, [Counting()])
print("done", flush=True)
"""


def kill_and_resume(tmp_path: Path, model: Path, counts: list[int], num_kills: int) -> None:
    """SIGKILL at random moments, with all readers at work; what is asked for again must stay under a chunk a kill."""
    manifest = pack_model(model, counts, tmp_path / "nas", SETTINGS)
    stage = manifest.stages[1]
    total = sum(p.num_bytes for f in stage.files for p in f.pieces)
    (tmp_path / "stage.json").write_bytes(to_json(stage))
    log = tmp_path / "sent"
    source, kills = random.Random(5), 0
    command = [
        sys.executable,
        "-c",
        _CHILD,
        str(tmp_path / "store"),
        str(tmp_path / "stage.json"),
        str(tmp_path / "nas"),
        str(log),
    ]
    while True:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            if kills < num_kills:
                time.sleep(source.uniform(0, 0.03))
                child.send_signal(signal.SIGKILL)
            if child.stdout.readline() == "done\n":
                break
        kills += 1
    check(tmp_path / "store" / "slices" / stage.slice_id, stage)
    sent = sum(int(line) for line in log.read_text().split())
    assert total <= sent <= total + kills * CHUNK_BYTES


def test_killed_processes_resume(tiny: Path, tmp_path: Path) -> None:
    kill_and_resume(tmp_path, tiny, [10, 12, 8], 5)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_hundred_kills(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, sample_path(), [10, 12, 8], 100)


def test_a_journal_that_claims_too_much_is_found_out(packing: Packing, tmp_path: Path, small_reads: None) -> None:
    """As after a power failure: the journal is on the disk, the data is not."""
    stage, store = middle(packing), ShardStore(tmp_path)
    with pytest.raises(NetworkError):
        store.fetch(stage, [Peer(pieces_of_packing(packing), cut_after=100_000)])
    incoming = tmp_path / "incoming" / stage.slice_id
    path = incoming / stage.weights
    path.write_bytes(bytes(path.stat().st_size))
    with (incoming / "journal").open("ab") as journal:
        journal.write(b"0 3 999999999\n0 4")
    folder, _ = store.fetch(stage, [Peer(pieces_of_packing(packing))])
    check(folder, stage)


def test_one_peer_dies_and_another_takes_over(packing: Packing, tmp_path: Path, small_reads: None) -> None:
    dying, other = Peer(pieces_of_packing(packing), name="a", cut_after=20_000), Peer(pieces_of_packing(packing), name="b")
    folder, report = ShardStore(tmp_path).fetch(middle(packing), [dying, other])
    check(folder, middle(packing))
    total = sum(p.num_bytes for f in middle(packing).files for p in f.pieces)
    assert sum(report.bytes_by_source.values()) == total


# -- trusting nobody --------------------------------------------------------------------------------------------


def test_a_lying_peer_is_left_for_an_honest_one(packing: Packing, tmp_path: Path) -> None:
    liar, honest = Peer(pieces_of_packing(packing), name="liar"), Peer(pieces_of_packing(packing), name="honest")
    liar.corrupt = {p.sha256 for f in middle(packing).files for p in f.pieces}
    folder, report = ShardStore(tmp_path).fetch(middle(packing), [liar, honest])
    check(folder, middle(packing))
    assert report.discarded_bytes > 0


def test_a_corrupt_piece_is_named_when_nobody_has_a_good_one(packing: Packing, tmp_path: Path) -> None:
    peer = Peer(pieces_of_packing(packing))
    victim = next(p for p in middle(packing).files[0].pieces if p.name == "blk.5.ffn_up.weight")
    peer.corrupt = {victim.sha256}
    store = ShardStore(tmp_path)
    with pytest.raises(CorruptWeightsError) as caught:
        store.fetch(middle(packing), [peer])
    assert caught.value.details["tensor"] == victim.name
    assert caught.value.details["expected"] == victim.sha256
    assert caught.value.details["actual"] != victim.sha256
    assert store.find(middle(packing)) is None


def test_a_rotten_slice_in_the_store_is_not_copied_on(tiny: Path, packing: Packing, tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    folder, _ = store.fetch(middle(packing), [Peer(pieces_of_packing(packing))])
    victim = next(p for p in middle(packing).files[0].pieces if p.name == "blk.5.ffn_up.weight")
    with (folder / middle(packing).weights).open("r+b") as file:
        file.seek(victim.offset_bytes)
        file.write(b"rotten")
    moved = make_manifest(tiny, [10, 15, 5], SETTINGS)
    folder, report = store.fetch(moved.manifest.stages[1], [Peer(pieces_of_packing(moved))])
    check(folder, moved.manifest.stages[1])
    assert report.discarded_bytes == victim.num_bytes


def test_nobody_has_it(packing: Packing, tmp_path: Path) -> None:
    with pytest.raises(CorruptWeightsError, match="no source has a piece"):
        ShardStore(tmp_path).fetch(middle(packing), [])


# -- space, rate, progress --------------------------------------------------------------------------------------


def test_space_is_checked_first(packing: Packing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, peer = ShardStore(tmp_path), Peer(pieces_of_packing(packing))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(UsageError, match="not enough disk space") as caught:
        store.fetch(middle(packing), [peer])
    assert caught.value.details["free_bytes"] == 1000
    assert peer.sent_bytes == 0


def test_a_full_disk_says_so(packing: Packing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Transfer, *args: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Transfer, "_write", full)
    with pytest.raises(UsageError, match="No space left") as caught:
        ShardStore(tmp_path).fetch(middle(packing), [Peer(pieces_of_packing(packing))])
    assert "free some space" in caught.value.hint


def test_the_rate_limit_holds_for_all_readers_together() -> None:
    clock = ManualClock()
    limit = RateLimit(1000.0, clock)
    for _ in range(10):
        limit.take(500)
    assert clock.now_s() == pytest.approx(4.5)  # the first is free, the tenth waits for nine


def test_a_limited_transfer_takes_its_time_and_local_bytes_are_free(packing: Packing, tmp_path: Path) -> None:
    clock = ManualClock()
    stage = middle(packing)
    total = sum(p.num_bytes for f in stage.files for p in f.pieces)
    options = TransferOptions(num_readers=1, peer_bytes_per_s=total / 60)
    ShardStore(tmp_path / "a", clock=clock).fetch(stage, [Peer(pieces_of_packing(packing))], options=options)
    assert 55 < clock.now_s() <= 60
    started_s = clock.now_s()
    ShardStore(tmp_path / "b", clock=clock).fetch(stage, [Peer(pieces_of_packing(packing), rank=0)], options=options)
    assert clock.now_s() == started_s


def test_progress_tells_rate_and_time_left() -> None:
    clock, seen = ManualClock(), list[TransferProgress]()
    meter = ProgressMeter(1000, seen.append, clock)
    for _ in range(10):
        clock.sleep(1.0)
        meter.add(100)
    assert seen[4].bytes_per_s == pytest.approx(100)
    assert seen[4].left_s == pytest.approx(5)
    assert seen[-1].done_bytes == 1000
    assert seen[4].line() == "500 B of 1000 B, 100 B/s, 5 s left"
