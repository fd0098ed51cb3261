"""`shardwise run`: one generation, streamed; then the per-boundary table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli import split_options as flags
from shardwise.cli.texts import JsonSchema, schema_text, weight_folders
from shardwise.errors import UsageError


def run(  # one parameter a flag
    model: flags.Model,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text; '-' reads standard input.")] = "",
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    system: Annotated[str, typer.Option("--system", help="System message (implies a chat).")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    stages: flags.Stages = 1,
    layers: flags.Layers = "",
    plan: flags.PlanFile = None,
    nodes: flags.Nodes = "",
    cluster: flags.ClusterFile = "",
    auto: flags.Auto = False,
    max_tokens: flags.MaxTokens = 128,
    ctx: flags.Ctx = 0,
    sessions: flags.Sessions = 1,
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
    temperature: flags.Temperature = 0.0,
    top_k: flags.TopK = 40,
    top_p: flags.TopP = 0.95,
    min_p: flags.MinP = 0.05,
    typical_p: flags.TypicalP = 1.0,
    repeat_penalty: flags.RepeatPenalty = 1.0,
    presence_penalty: flags.PresencePenalty = 0.0,
    frequency_penalty: flags.FrequencyPenalty = 0.0,
    repeat_last_n: flags.RepeatLastN = 64,
    seed: flags.Seed = 0,
    logit_bias: flags.LogitBias = None,
    grammar: flags.Grammar = "",
    grammar_file: flags.GrammarFile = None,
    json_schema: JsonSchema = "",
    stop: flags.Stop = None,
    ignore_eos: flags.IgnoreEos = False,
    logprobs: Annotated[int, typer.Option("--logprobs", help="Candidates a token in --json; -1 = none.")] = -1,
    predict: Annotated[bool, typer.Option("--predict/--no-predict", help="Predict the run first (a short probe, once).")] = True,
) -> None:
    """Generate once, streamed; then show where the time went."""
    text = _prompt_text(prompt, file)
    settings = flags.sampling_settings(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        repeat_penalty=repeat_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repeat_last_n=repeat_last_n,
        seed=seed,
        logit_bias=logit_bias,
        grammar=grammar,
        grammar_file=grammar_file,
        json_schema=schema_text(json_schema),
        num_logprobs=logprobs,
    )
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
        probe_interval_s=0.0,
    )
    from shardwise.cli.generation import generate_once

    generate_once(
        model,
        options,
        text,
        system=system,
        raw=raw,
        max_tokens=max_tokens,
        sampling=settings,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        predict=predict,
    )


def _prompt_text(prompt: str, file: Path | None) -> str:
    if file is not None:
        if prompt:
            raise UsageError("both --prompt and --file", where="prompt", hint="give one of them")
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the prompt: {error}", where=str(file)) from error
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise UsageError(
            "the prompt is empty", where="prompt", hint="--prompt TEXT, --file FILE, or --prompt - for standard input"
        )
    return text
