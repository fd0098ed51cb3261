"""`shardwise chat`: a conversation on the terminal, or of what is piped in, a line a question."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.cli import split_options as flags
from shardwise.cli.texts import JsonSchema, schema_text, weight_folders


def chat(  # one parameter a flag
    model: flags.Model,
    system: Annotated[str, typer.Option("--system", help="System message.")] = "",
    stages: flags.Stages = 1,
    layers: flags.Layers = "",
    plan: flags.PlanFile = None,
    nodes: flags.Nodes = "",
    cluster: flags.ClusterFile = "",
    auto: flags.Auto = False,
    max_tokens: flags.MaxTokens = 512,
    ctx: flags.Ctx = 0,
    threads: flags.Threads = 1,
    kv_type: flags.KvType = "f16",
    wire_dtype: flags.WireDtype = "f32",
    chunk_tokens: flags.ChunkTokens = 0,
    gpu_layers: flags.GpuLayers = 0,
    blas: flags.Blas = "auto",
    deterministic: flags.Deterministic = False,
    paranoid: flags.Paranoid = False,
    weights_from: flags.WeightsFrom = None,
    fetch_rate: flags.FetchRate = "",
    temperature: flags.Temperature = 0.7,
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
) -> None:
    """A conversation; an empty line or end of input (Ctrl-D) ends it, Ctrl-C an answer. With --json one document of all."""
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
    )
    options = flags.run_options(
        num_stages=stages,
        layers=flags.split_layers(layers, plan),
        nodes=flags.split_nodes(nodes, plan),
        follow=flags.follow_policy(cluster, auto, plan),
        context_tokens=ctx,
        max_sessions=1,
        threads=threads,
        kv_type=kv_type,
        wire_dtype=wire_dtype,
        chunk_tokens=chunk_tokens,
        gpu_layers=gpu_layers,
        blas=blas,
        deterministic=deterministic,
        paranoid=paranoid,
        weights_from=weight_folders(weights_from, nodes=bool(nodes or cluster)),
        fetch_bytes_per_s=flags.fetch_rate(fetch_rate),
        probe_interval_s=0.0,
    )
    from shardwise.cli.conversation import converse

    converse(model, options, system=system, max_tokens=max_tokens, sampling=settings, stop=tuple(stop or ()))
