"""`shardwise serve`: the OpenAI-compatible API, metrics and the dashboard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.cli import split_options as flags
from shardwise.cli.common import output
from shardwise.cli.ending import recovery_line
from shardwise.cli.texts import weight_folders
from shardwise.errors import MissingExtraError

PANEL = "Server"

Host = Annotated[str, typer.Option("--host", help="Address; others than loopback need a key.", rich_help_panel=PANEL)]
Port = Annotated[int, typer.Option("--port", help="0 = a free one.", min=0, max=65535, rich_help_panel=PANEL)]
Alias = Annotated[list[str] | None, typer.Option("--alias", help="A further model name; repeatable.", rich_help_panel=PANEL)]
KeyFile = Annotated[Path | None, typer.Option("--api-key-file", help="Hashed API keys.", rich_help_panel=PANEL)]
NewKey = Annotated[str, typer.Option("--new-api-key", help="Make a key with this name, and end.", rich_help_panel=PANEL)]
PerMinute = Annotated[int, typer.Option(help="Limit of the new key; 0 = none.", min=0, rich_help_panel=PANEL)]
CorsOrigin = Annotated[list[str] | None, typer.Option("--cors-origin", help="A web page that may ask.", rich_help_panel=PANEL)]
Drain = Annotated[float, typer.Option("--drain", help="Seconds for running answers at the end.", min=0, rich_help_panel=PANEL)]
TraceEndpoint = Annotated[str, typer.Option(help="OpenTelemetry collector (OTLP over HTTP).", rich_help_panel=PANEL)]
AccessLog = Annotated[bool, typer.Option("--access-log/--no-access-log", help="A line a request.", rich_help_panel=PANEL)]


def serve(  # one parameter a flag
    model: flags.Model,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    alias: Alias = None,
    api_key_file: KeyFile = None,
    new_api_key: NewKey = "",
    requests_per_minute: PerMinute = 0,
    tokens_per_minute: PerMinute = 0,
    cors_origin: CorsOrigin = None,
    drain: Drain = 30.0,
    trace_endpoint: TraceEndpoint = "",
    access_log: AccessLog = True,
    stages: flags.Stages = 1,
    layers: flags.Layers = "",
    plan: flags.PlanFile = None,
    nodes: flags.Nodes = "",
    cluster: flags.ClusterFile = "",
    auto: flags.Auto = False,
    ctx: flags.Ctx = 0,
    sessions: flags.Sessions = 4,
    threads: flags.Threads = 1,
    kv_type: flags.KvType = "f16",
    wire_dtype: flags.WireDtype = "f32",
    chunk_tokens: flags.ChunkTokens = 0,
    gpu_layers: flags.GpuLayers = 0,
    blas: flags.Blas = "auto",
    deterministic: flags.Deterministic = False,
    recovery: flags.RecoveryGrade = "auto",
    replicate: flags.Replicate = "none",
    rebalance: flags.Rebalance = False,
    fallback: flags.FallbackModel = "",
    journal: flags.JournalDir = "",
    checkpoint_every: flags.CheckpointEvery = 0,
    checkpoint_dir: flags.CheckpointDir = "",
    paranoid: flags.Paranoid = False,
    weights_from: flags.WeightsFrom = None,
    fetch_rate: flags.FetchRate = "",
) -> None:
    """Serve the model: API under /v1, dashboard under /, until Ctrl-C."""
    try:
        from shardwise.server import command
        from shardwise.server.settings import ServerSettings, check_exposure
    except ImportError as error:
        raise MissingExtraError.for_extra("server", "shardwise serve") from error

    if new_api_key:
        limits = {"requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute}
        _show_key(new_api_key, command.make_key(api_key_file, new_api_key, **limits))
        return
    keys = command.read_key_file(api_key_file)
    settings = ServerSettings(
        host=host,
        port=port,
        alias=command.model_aliases(model, alias or []),
        cors_origins=tuple(cors_origin or ()),
        drain_s=drain,
        trace_endpoint=trace_endpoint,
    )
    check_exposure(settings, has_keys=bool(keys))
    options = flags.run_options(
        num_stages=stages,
        layers=flags.split_layers(layers, plan),
        nodes=flags.split_nodes(nodes, plan),
        follow=flags.follow_policy(cluster, auto, plan),
        context_tokens=ctx,
        max_sessions=sessions,
        threads=threads,
        kv_type=kv_type,
        wire_dtype=wire_dtype,
        chunk_tokens=chunk_tokens,
        gpu_layers=gpu_layers,
        blas=blas,
        deterministic=deterministic,
        recovery=flags.recovery_policy(recovery, replicate, rebalance, fallback),
        journal_dir=journal,
        checkpoint_every_tokens=checkpoint_every,
        checkpoint_dir=checkpoint_dir,
        paranoid=paranoid,
        weights_from=weight_folders(weights_from, nodes=bool(nodes or cluster)),
        fetch_bytes_per_s=flags.fetch_rate(fetch_rate),
    )
    command.require_runnable(model, options)
    command.serve_command(
        command.local_launch(model, options, flags.equip),
        settings,
        keys=keys,
        say=output().note,
        access_log=access_log and not output().quiet,
        recovered=recovery_line,
        expect=_expectation(plan, local=not nodes and not cluster),
    )


def _show_key(name: str, key: str) -> None:
    if output().json:
        output().document({"name": name, "key": key})
    output().plain(key)
    output().note(f"the key '{name}' is shown this once; only its hash is kept")


def _expectation(plan: Path | None, *, local: bool) -> Callable[[Any], Any]:
    """What the dashboard compares with: the plan's promise, or a prediction from rates of this machine."""
    from shardwise.server import command

    promised = command.planned(plan)

    def expect(engine: Any) -> Any:
        if promised is not None or not local:
            return promised or command.predicted(None)
        from shardwise.bench.run_prediction import predict_local

        return command.predicted(predict_local(engine.model, engine.options, prompt_tokens=256, output_tokens=128)[0])

    return expect
