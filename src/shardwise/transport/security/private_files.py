"""Files that only their owner may read. Bytes flow in and out; a file that others can read is refused.

**Promises** a written file is complete or absent (written beside, then renamed) and has mode 0600 from its first byte on.
**Fails when** the file is missing, readable by others, or not the expected record: `UsageError` that names the path and the cure.
**Called by** `keys`, `invites`, `allow_list`.

Windows has no mode bits: there the profile folder's access list protects the file and the check is skipped.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import TypeVar

from shardwise.errors import UsageError
from shardwise.records import Record, from_json, to_json

R = TypeVar("R", bound=Record)
MAX_FILE_BYTES = 16 * 2**20


def write_private(path: Path, record: Record, *, replace: bool = True) -> bool:
    """Write atomically with mode 0600; missing parent folders are made with mode 0700.

    Without `replace` a file that is there already stays, and the result is False.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(
            f"cannot make the folder for a private file: {error.strerror}", where=str(path.parent), hint="choose another folder"
        ) from error
    beside = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as out:
            out.write(to_json(record))
            out.flush()
            os.fsync(out.fileno())
        if replace:
            os.replace(beside, path)
        else:
            os.link(beside, path)  # fails if somebody was faster
    except FileExistsError:
        return False
    except OSError as error:
        raise UsageError(
            f"cannot write a private file: {error.strerror}", where=str(path), hint="check the folder's owner and free space"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
    return True


def read_private(path: Path, kind: type[R]) -> R:
    """Read a record from a file that only its owner may read; errors never quote the content."""
    try:
        with path.open("rb") as source:
            mode = stat.S_IMODE(os.fstat(source.fileno()).st_mode)
            if os.name == "posix" and mode & 0o077:
                raise UsageError(
                    f"a private file is open to other users (mode {mode:04o})", where=str(path), hint=f"chmod 600 {path}"
                )
            data = source.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read a private file: {error.strerror}", where=str(path), hint="make it again, or check its owner"
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"a private file is larger than {MAX_FILE_BYTES} bytes", where=str(path), hint="make it again")
    try:
        return from_json(data, kind, where=str(path))
    except UsageError:
        # The cause may quote values, and these are secret.
        raise UsageError(f"not a valid {kind.__name__} file", where=str(path), hint="make it again") from None
