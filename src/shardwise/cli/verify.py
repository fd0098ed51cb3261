"""`shardwise verify DIR`: checks every bit that a manifest vouches for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.common import output
from shardwise.clock import SystemClock
from shardwise.units import format_bytes, format_duration


def verify(
    directory: Annotated[Path, typer.Argument(help="A folder that 'pack' wrote.", metavar="DIR")],
    digest: Annotated[str, typer.Option("--digest", help="Accept only the manifest with this SHA-256.")] = "",
) -> None:
    """Check a packed folder: manifest, every tensor, every byte between; exit status 4 if anything is not as it must be."""
    from shardwise.records import plain
    from shardwise.shards.manifest import load_manifest
    from shardwise.shards.verify import require_whole, verify_dir

    shown, clock = output(), SystemClock()
    started_s = clock.now_s()
    with shown.progress() as update:
        found = verify_dir(directory, expected=digest, progress=lambda done, total: update("verifying", done / max(total, 1)))
    for mismatch in found:
        shown.plain(mismatch.sentence())
    require_whole(found, directory, mismatches=[plain(mismatch) for mismatch in found])
    manifest = load_manifest(directory)
    files = {file.name: file.num_bytes for stage in manifest.stages for file in stage.files}
    num_bytes, took_s = sum(files.values()), clock.now_s() - started_s
    if shown.json:
        shown.document(
            {"whole": True, "manifest_digest": manifest.digest, "files": len(files), "bytes": num_bytes, "duration_s": took_s}
        )
        return
    shown.plain(f"whole: {len(files)} files, {format_bytes(num_bytes)} in {format_duration(took_s)}; manifest {manifest.digest}")
