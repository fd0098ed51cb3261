"""What a node has on its disk: slices named by their content, found by piece, shared by deployments.

    root/slices/<slice id>/     complete: slice.json, the files, verification records
    root/incoming/<slice id>/   under way: files of their final size, journal
    root/holds/                 which slices running processes use
    root/locks/

**Promises** what stands under `slices` was hashed byte for byte before it got there, by a rename; a slice that is here is
not fetched again; a piece that any slice here has is copied, not fetched; a slice in use is not collected. **Fails when**
the disk is too small (`UsageError`, before anything is written) or as `transfer` does. **Called by** deploy. Several
processes may share one store.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.clock import Clock, SystemClock
from shardwise.errors import UsageError
from shardwise.records import Record, from_json, to_json
from shardwise.shards.cache_folder import default_cache
from shardwise.shards.gguf_writer import make_directory, require_space, sync_directory
from shardwise.shards.locks import FileLock
from shardwise.shards.manifest import StageSlice
from shardwise.shards.pieces import LocalPieces, PieceSource, Place, places_of_files
from shardwise.shards.progress import OnTransfer
from shardwise.shards.transfer import JOURNAL_NAME, Transfer, TransferOptions, TransferReport
from shardwise.shards.verification import mark_verified
from shardwise.units import parse_bytes

SLICE_NAME = "slice.json"
LOCK_TIMEOUT_S = 3600.0  # another process may be fetching the same slice


def default_store() -> Path:
    """Where slices lie."""
    return default_cache() / "store"


def default_cap_bytes() -> int | None:
    """`SHARDWISE_STORE_CAP`, e.g. `200 GB`: what a store may take up on this machine; None = no limit."""
    text = os.environ.get("SHARDWISE_STORE_CAP")
    return parse_bytes(text, field="SHARDWISE_STORE_CAP") if text else None


class Hold(Record):
    """Slices that a process uses."""

    slices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Collected:
    """What a garbage collection did."""

    removed: tuple[str, ...]
    freed_bytes: int
    kept_bytes: int


class ShardStore:
    """A folder of slices."""

    def __init__(self, root: Path, *, clock: Clock | None = None) -> None:
        self.root = root
        self._clock = clock or SystemClock()
        for name in ("slices", "incoming", "holds", "locks"):
            make_directory(root / name)

    # -- what is here -----------------------------------------------------------------------------------------------

    def find(self, stage: StageSlice) -> Path | None:
        """The folder of a complete slice, or None; counts as a use."""
        path = self.root / "slices" / stage.slice_id / SLICE_NAME
        if not path.exists():
            return None
        now_s = self._clock.wall_s()
        with contextlib.suppress(OSError):
            os.utime(path, (now_s, now_s))
        return path.parent

    def slices(self) -> dict[str, StageSlice]:
        """Complete slices by id; a folder that is not readable is left out."""
        out: dict[str, StageSlice] = {}
        for path in sorted((self.root / "slices").iterdir()):
            with contextlib.suppress(OSError, UsageError):
                stage = from_json((path / SLICE_NAME).read_bytes(), StageSlice)
                if stage.slice_id == path.name:
                    out[path.name] = stage
        return out

    def pieces(self) -> LocalPieces:
        """Every piece in the store, to copy from or to serve to peers."""
        places: dict[str, Place] = {}
        for slice_id, stage in self.slices().items():
            places |= places_of_files(self.root / "slices" / slice_id, stage.files)
        return LocalPieces("this store", places)

    def num_bytes(self) -> int:
        """What everything in the store takes up."""
        return sum(_tree_bytes(path) for kind in ("slices", "incoming") for path in (self.root / kind).iterdir())

    # -- fetching ---------------------------------------------------------------------------------------------------

    def fetch(
        self,
        stage: StageSlice,
        sources: Sequence[PieceSource],
        *,
        key: bytes = b"",
        options: TransferOptions | None = None,
        progress: OnTransfer | None = None,
    ) -> tuple[Path, TransferReport]:
        """Have a slice: its folder, and what had to be moved for it. With `key` (see `verification`) it counts as verified."""
        lock_path = self.root / "locks" / f"{stage.slice_id}.lock"
        with FileLock(lock_path, timeout_s=LOCK_TIMEOUT_S, what="the same slice", clock=self._clock):
            found = self.find(stage)
            if found is not None:
                return found, TransferReport()
            incoming = self.root / "incoming" / stage.slice_id
            make_directory(incoming)
            require_space(self.root, max(0, stage.num_bytes - _tree_bytes(incoming)))
            transfer = Transfer(stage, incoming, [self.pieces(), *sources], options=options, progress=progress, clock=self._clock)
            report = transfer.run()
            return self._complete(stage, incoming, key), report

    def _complete(self, stage: StageSlice, incoming: Path, key: bytes) -> Path:
        if key:
            mark_verified(incoming, stage, key)
        (incoming / JOURNAL_NAME).unlink(missing_ok=True)
        (incoming / SLICE_NAME).write_bytes(to_json(stage))
        target = self.root / "slices" / stage.slice_id
        shutil.rmtree(target, ignore_errors=True)  # an unreadable one: `find` did not take it
        os.replace(incoming, target)
        sync_directory(target.parent)
        return target

    def discard(self, stage: StageSlice) -> None:
        """Forget a slice that turned out to be corrupt."""
        shutil.rmtree(self.root / "slices" / stage.slice_id, ignore_errors=True)

    # -- use and garbage collection ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def hold(self, stages: Sequence[StageSlice]) -> Iterator[None]:
        """Keep slices from being collected, until the end of the block or of this process."""
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        path = self.root / "holds" / f"{name}.json"
        with FileLock(self.root / "holds" / f"{name}.lock") as lock:
            path.write_bytes(to_json(Hold(slices=tuple(stage.slice_id for stage in stages))))
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
                lock.release()
                lock.path.unlink(missing_ok=True)

    def collect(self, cap_bytes: int) -> Collected:
        """Remove slices nobody holds, least recently used first, until the store takes up at most `cap_bytes`."""
        removed: list[str] = []
        with FileLock(self.root / "locks" / "collect.lock", timeout_s=60.0, what="the same collection", clock=self._clock):
            before = total = self.num_bytes()
            held = self._held()
            for path in self._by_age():
                if total <= cap_bytes:
                    break
                size = _tree_bytes(path)
                if path.name not in held and self._remove(path):
                    removed.append(path.name)
                    total -= size
        return Collected(removed=tuple(removed), freed_bytes=before - total, kept_bytes=total)

    def _by_age(self) -> list[Path]:
        """Abandoned transfers first, then slices by their last use."""
        complete = [p for p in (self.root / "slices").iterdir() if (p / SLICE_NAME).exists()]
        broken = [p for p in (self.root / "slices").iterdir() if not (p / SLICE_NAME).exists()]
        complete.sort(key=lambda p: (p / SLICE_NAME).stat().st_mtime)
        return [*broken, *(self.root / "incoming").iterdir(), *complete]

    def _remove(self, path: Path) -> bool:
        """Remove unless a transfer works on it; first out of sight, so that nobody finds half of it."""
        lock = FileLock(self.root / "locks" / f"{path.name}.lock")
        if not lock.try_acquire():
            return False
        try:
            trash = self.root / "incoming" / f"trash-{secrets.token_hex(4)}"
            os.replace(path, trash)
            shutil.rmtree(trash, ignore_errors=True)
        except OSError:
            return False  # Windows: a file is mapped
        finally:
            lock.release()
        return True

    def _held(self) -> set[str]:
        """Slices that living processes hold; what dead ones left is cleared away."""
        out: set[str] = set()
        for path in (self.root / "holds").glob("*.json"):
            lock = FileLock(path.with_suffix(".lock"))
            if lock.try_acquire():
                path.unlink(missing_ok=True)
                lock.release()
                lock.path.unlink(missing_ok=True)
                continue
            try:
                out |= set(from_json(path.read_bytes(), Hold).slices)
            except FileNotFoundError:
                continue  # let go meanwhile
            except (OSError, UsageError):  # of a living process, and it does not say which: nothing is taken from under it
                out |= {folder.name for folder in (self.root / "slices").iterdir()}
        return out


def _tree_bytes(directory: Path) -> int:
    """What the files take up on the disk (a file under way is sparse)."""
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            stat = path.stat()
            if path.is_file():
                total += min(stat.st_size, getattr(stat, "st_blocks", 2**60) * 512)
    return total
