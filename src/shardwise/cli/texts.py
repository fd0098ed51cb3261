"""Arguments that name files: looked at before anything starts, so that one that is not there is an error at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.common import output
from shardwise.cli.split_options import SAMPLING
from shardwise.errors import UsageError

JsonSchema = Annotated[
    str,
    typer.Option("--json-schema", help="JSON schema the answer must follow, or @FILE with one.", rich_help_panel=SAMPLING),
]


def schema_text(given: str) -> str:
    """`@file` -> what is in it; anything else is the schema itself (no JSON begins with `@`)."""
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
        raise UsageError(f"cannot read the JSON schema: {reason}", where=given[1:] or "json-schema") from error


def weight_folders(given: list[str] | None, *, nodes: bool) -> tuple[str, ...]:
    """`--weights-from`. Workers on this machine need the folder here; on other nodes it may be mounted only there."""
    for folder in given or ():
        if Path(folder).is_dir():
            continue
        if not nodes:
            raise UsageError("there is no such folder", where=f"--weights-from {folder}", hint="one that 'shardwise pack' wrote")
        output().note(f"--weights-from {folder}: not on this machine; nodes that do not have it either fetch from elsewhere")
    return tuple(given or ())
