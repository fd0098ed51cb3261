"""Ray's temporary folder: made for one raylet, noted beside the node's state, removed with it or by whoever comes next.

**Promises** nobody but this user gets into it, though Ray opens its own folder to all; a folder whose daemon was killed is
removed at the node's next start, or when it leaves. **Fails when** nothing can be written there (`UsageError`).
**Called by** `raylet`, `state`.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from shardwise.errors import UsageError

_PREFIX = "swray-"


def make_folder(note: Path | None) -> Path:
    """A new folder for Ray (short: Unix sockets live in it), its path noted; what the note named before is removed."""
    if note is not None:
        remove_noted(note)
    try:
        private = Path(tempfile.mkdtemp(prefix=_PREFIX))
        inside = private / "r"
        inside.mkdir()
        if note is not None:
            note.write_text(str(private), encoding="utf-8")
            note.chmod(0o600)
    except OSError as error:
        raise UsageError(f"no temporary folder for Ray: {error.strerror}", where=str(error.filename or "")) from error
    return inside


def remove_folder(inside: Path, note: Path | None) -> None:
    """After the raylet has ended."""
    shutil.rmtree(inside.parent, ignore_errors=True)
    if note is not None:
        note.unlink(missing_ok=True)


def remove_noted(note: Path) -> None:
    """Remove what an earlier raylet of this node left, if its daemon was killed."""
    try:
        folder = Path(note.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return
    if folder.name.startswith(_PREFIX) and folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)
    note.unlink(missing_ok=True)
