"""`shardwise pack MODEL --out DIR`: every stage's slice, and the manifest with checksums."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli import split_options as flags
from shardwise.cli.common import output
from shardwise.clock import SystemClock
from shardwise.units import format_bytes, format_duration, format_rate


def pack(
    model: flags.Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write; made if it is not there.")],
    stages: flags.Stages = 1,
    layers: flags.Layers = "",
    plan: flags.PlanFile = None,
    ctx: flags.Ctx = 0,
    kv_type: flags.KvType = "f16",
    wire_dtype: flags.WireDtype = "f32",
) -> None:
    """Write every stage's slice and a manifest with checksums; what is there already and unchanged is kept."""
    from shardwise.deploy.slices import manifest_settings, weights_path
    from shardwise.model import describe_model, resolve_model
    from shardwise.shards.packing import pack_model

    shown, clock = output(), SystemClock()
    options = flags.run_options(
        num_stages=stages,
        layers=flags.split_layers(layers, plan),
        context_tokens=ctx,
        kv_type=kv_type,
        wire_dtype=wire_dtype,
    )
    description = describe_model(resolve_model(model))
    options = options.settled_for(description)
    options.check(description)
    started_s = clock.now_s()
    with shown.progress() as update:
        manifest = pack_model(
            weights_path(description),
            options.layer_counts(description),
            out,
            manifest_settings(options),
            progress=lambda done, total: update("packing", done / max(total, 1)),
        )
    took_s = clock.now_s() - started_s
    files = [file for stage in manifest.stages for file in stage.files]
    num_bytes = sum(file.num_bytes for file in files)
    if shown.json:
        shown.document(
            {
                "directory": str(out),
                "manifest_digest": manifest.digest,
                "model": {"name": manifest.model, "revision_digest": manifest.revision_digest},
                "stages": [
                    {
                        "layers": [stage.start, stage.end],
                        "weight_bytes": stage.weight_bytes,
                        "files": [{"name": file.name, "bytes": file.num_bytes} for file in stage.files],
                    }
                    for stage in manifest.stages
                ],
                "bytes": num_bytes,
                "duration_s": took_s,
            }
        )
        return
    for stage in manifest.stages:
        names = ", ".join(f"{file.name} ({format_bytes(file.num_bytes)})" for file in stage.files)
        shown.plain(f"layers {stage.start}-{stage.end - 1}: {names}")
    rate = format_rate(num_bytes / took_s) if took_s > 0 else ""
    shown.plain(f"{format_bytes(num_bytes)} in {format_duration(took_s)} ({rate}); manifest {manifest.digest}")
