"""Sharing, holding and collecting slices."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import zmq

from shardwise.clock import ManualClock
from shardwise.errors import NetworkError, UsageError
from shardwise.records import replace
from shardwise.shards.locks import FileLock
from shardwise.shards.packing import Packing, make_manifest, pack_model
from shardwise.shards.pieces import pieces_of_packing
from shardwise.shards.store import ShardStore
from shardwise.stage.own_slice import SliceOrder, own_slice
from tests.shards.conftest import SETTINGS
from tests.shards.test_transfer import Peer


@pytest.fixture(scope="module")
def packing(tiny: Path) -> Packing:
    return make_manifest(tiny, [10, 12, 8], SETTINGS)


def test_two_deployments_share_a_slice(tiny: Path, packing: Packing, tmp_path: Path) -> None:
    """The same stage under another context length is another deployment and the same bytes."""
    other = make_manifest(tiny, [10, 12, 8], replace(SETTINGS, context_tokens=4096))
    assert other.manifest.digest != packing.manifest.digest
    store = ShardStore(tmp_path)
    first, _ = store.fetch(packing.manifest.stages[0], [pieces_of_packing(packing)])
    size = store.num_bytes()
    second, report = store.fetch(other.manifest.stages[0], [])
    assert (first, store.num_bytes(), report.bytes_by_source) == (second, size, {})


def fill(store: ShardStore, packing: Packing, clock: ManualClock) -> None:
    for stage in packing.manifest.stages:
        store.fetch(stage, [pieces_of_packing(packing)])
        store.find(stage)
        clock.sleep(10)


def test_the_least_recently_used_goes_first(packing: Packing, tmp_path: Path) -> None:
    clock = ManualClock(1e9)
    store = ShardStore(tmp_path, clock=clock)
    fill(store, packing, clock)
    one, two, three = packing.manifest.stages
    store.find(one)  # used again
    done = store.collect(store.num_bytes() - 1)
    assert done.removed == (two.slice_id,)
    assert done.kept_bytes == store.num_bytes()
    assert store.find(one)
    assert not store.find(two)
    assert store.find(three)


def test_the_cap_is_kept_and_nothing_goes_below_it(packing: Packing, tmp_path: Path) -> None:
    clock = ManualClock(1e9)
    store = ShardStore(tmp_path, clock=clock)
    fill(store, packing, clock)
    assert store.collect(store.num_bytes()).removed == ()
    assert len(store.collect(0).removed) == 3
    assert store.num_bytes() == 0


def test_a_held_slice_stays(packing: Packing, tmp_path: Path) -> None:
    clock = ManualClock(1e9)
    store = ShardStore(tmp_path, clock=clock)
    fill(store, packing, clock)
    held = packing.manifest.stages[0]
    with store.hold([held]):
        store.collect(0)
        assert list(store.slices()) == [held.slice_id]
    store.collect(0)
    assert not store.slices()


def test_a_dead_process_holds_nothing(packing: Packing, tmp_path: Path) -> None:
    clock = ManualClock(1e9)
    store = ShardStore(tmp_path, clock=clock)
    fill(store, packing, clock)
    code = (
        "import sys, os\nfrom pathlib import Path\nfrom shardwise.shards.store import ShardStore\n"
        "store = ShardStore(Path(sys.argv[1]))\n"
        "hold = store.hold(list(store.slices().values()))\nhold.__enter__()\n"
        "print('held', flush=True)\nsys.stdin.read()\nos._exit(9)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        assert store.collect(0).removed == ()
        child.stdin.close()
        assert child.wait(10) == 9
    assert len(store.collect(0).removed) == 3
    assert list((tmp_path / "holds").iterdir()) == []


def test_abandoned_transfers_go_before_slices(packing: Packing, tmp_path: Path) -> None:
    clock = ManualClock(1e9)
    store = ShardStore(tmp_path, clock=clock)
    store.fetch(packing.manifest.stages[0], [pieces_of_packing(packing)])
    with pytest.raises(NetworkError):
        store.fetch(packing.manifest.stages[1], [Peer(pieces_of_packing(packing), cut_after=90_000)])
    done = store.collect(store.num_bytes() - 1)
    assert done.removed == (packing.manifest.stages[1].slice_id,)
    assert store.find(packing.manifest.stages[0])


def test_two_threads_fetch_once(packing: Packing, tmp_path: Path) -> None:
    peer = Peer(pieces_of_packing(packing))
    stage = packing.manifest.stages[1]
    threads = [threading.Thread(target=lambda: ShardStore(tmp_path).fetch(stage, [peer])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert peer.sent_bytes == sum(p.num_bytes for f in stage.files for p in f.pieces)


def test_a_damaged_index_is_fetched_anew(packing: Packing, tmp_path: Path) -> None:
    store, stage = ShardStore(tmp_path), packing.manifest.stages[0]
    folder, _ = store.fetch(stage, [pieces_of_packing(packing)])
    (folder / "slice.json").write_text("{")
    assert store.slices() == {}
    (folder / "slice.json").unlink()
    again, report = store.fetch(stage, [pieces_of_packing(packing)])
    assert again == folder
    assert sum(report.bytes_by_source.values()) > 0


def test_a_lock_has_one_holder_and_a_deadline(tmp_path: Path) -> None:
    clock = ManualClock()
    with FileLock(tmp_path / "lock"):
        with (
            pytest.raises(UsageError, match="another process works on the slice"),
            FileLock(tmp_path / "lock", timeout_s=5, what="the slice", clock=clock),
        ):
            pass
        assert clock.now_s() >= 5
    with FileLock(tmp_path / "lock"):
        pass


def test_a_worker_keeps_its_nodes_store_under_the_cap(
    packing: Packing, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a node had for another deployment makes room; what it runs now stays, even above the cap."""
    monkeypatch.setenv("SHARDWISE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("SHARDWISE_STORE_CAP", "1 KiB")
    pack_model(tiny, [10, 12, 8], tmp_path / "nas", SETTINGS)
    store = ShardStore(tmp_path / "store")
    store.fetch(packing.manifest.stages[0], [pieces_of_packing(packing)])
    order = SliceOrder(manifest=packing.manifest, store=str(tmp_path / "store"), folders=(str(tmp_path / "nas"),))
    with zmq.Context() as context, own_slice(order, 1, context, None) as files:
        assert Path(files.weights).exists()
        assert list(store.slices()) == [packing.manifest.stages[1].slice_id]
