"""Verify once, then trust size, time and a signature: what a worker does before it maps its slice.

A full check ends in a record (slice id, file names, sizes, modification times) signed with HMAC-SHA256 under a key that only
this node has. The next start compares sizes and times and skips the read. **Promises** a file that was replaced, truncated or
touched is read again; so is everything with `paranoid`, and with a record that is missing, altered or of another node.
**Fails with** `CorruptWeightsError` that names file, tensor, expected, actual. **Called by** the stage worker, the store.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from shardwise.errors import UsageError
from shardwise.records import Record, from_json, to_json
from shardwise.shards.manifest import SliceFile, StageSlice
from shardwise.shards.verify import paths_in, require_whole, verify_file

RECORD_NAME = "verified.json"


class VerifiedFile(Record):
    """What a file was when every bit of it had been checked."""

    name: str
    num_bytes: int
    mtime_ns: int


class VerificationRecord(Record):
    """`content` is the slice's id; `signature` is over everything else."""

    content: str
    files: tuple[VerifiedFile, ...]
    signature: str = ""


def ensure_verified(
    paths: Mapping[str, Path],
    stage: StageSlice,
    key: bytes,
    *,
    record_dir: Path,
    paranoid: bool = False,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> bool:
    """Make sure that a stage's files (name -> path) are whole; returns whether they had to be read.

    `key`: 32 secret bytes of this node, e.g. `NodeKeys.derive("verification")`. The record is kept in `record_dir`.
    `on_bytes(n)` is called after each block.
    """
    record_path = _record_path(record_dir, stage)
    wanted = _current(paths, stage)
    if not paranoid and wanted is not None and _is_signed(record_path, wanted, key):
        return False
    found = [mismatch for file in stage.files for mismatch in verify_file(paths[file.name], file, on_bytes)]
    require_whole(found, paths[stage.weights].parent)
    # The state from before the reading: a file that changes meanwhile must not count as verified.
    if wanted is not None and wanted == _current(paths, stage):
        _write_record(record_path, wanted, key)
    return True


def mark_verified(directory: Path, stage: StageSlice, key: bytes) -> None:
    """Sign files in `directory` whose every byte this process has just hashed while writing them."""
    record = _current(paths_in(directory, stage.files), stage)
    if record is not None:
        _write_record(_record_path(directory, stage), record, key)


def _record_path(directory: Path, stage: StageSlice) -> Path:
    return directory / f"{stage.start}-{stage.end}.{RECORD_NAME}"


def _write_record(path: Path, record: VerificationRecord, key: bytes) -> None:
    """Write atomically; a folder that cannot be written only costs the next start a check."""
    signed = VerificationRecord(content=record.content, files=record.files, signature=_signature(record, key))
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        beside.write_bytes(to_json(signed))
        beside.replace(path)
    except OSError:
        return


def _current(paths: Mapping[str, Path], stage: StageSlice) -> VerificationRecord | None:
    """The record that these files would have now; None where one is missing or has another size."""
    files = [_look_at(paths[file.name], file) for file in stage.files]
    if any(file is None for file in files):
        return None
    return VerificationRecord(content=stage.slice_id, files=tuple(file for file in files if file is not None))


def _look_at(path: Path, file: SliceFile) -> VerifiedFile | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    if stat.st_size != file.num_bytes:
        return None
    return VerifiedFile(name=file.name, num_bytes=stat.st_size, mtime_ns=stat.st_mtime_ns)


def _is_signed(path: Path, wanted: VerificationRecord, key: bytes) -> bool:
    try:
        found = from_json(path.read_bytes(), VerificationRecord)
    except (OSError, UsageError):
        return False
    same = (found.content, found.files) == (wanted.content, wanted.files)
    return hmac.compare_digest(found.signature.encode(), _signature(wanted, key).encode()) and same


def _signature(record: VerificationRecord, key: bytes) -> str:
    unsigned = VerificationRecord(content=record.content, files=record.files)
    return hmac.new(key, b"shardwise verification 1\n" + to_json(unsigned), "sha256").hexdigest()
