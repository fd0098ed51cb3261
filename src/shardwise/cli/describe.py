"""`shardwise describe MODEL`: layers, bytes, FLOPs, KV cache, experts, and what can be split how."""

from __future__ import annotations

from typing import Annotated

import typer
from rich import box
from rich.table import Table

from shardwise.cli.common import Output, output
from shardwise.errors import UsageError
from shardwise.model import ModelDescription, describe_model
from shardwise.model.description import KV_TYPE_BYTES, LayerDescription
from shardwise.model.presets import presets
from shardwise.model.splits import split_options
from shardwise.model.summary import LayerGroup, active_params, describe_as_data, flops_per_token, group_layers, kv_bytes
from shardwise.units import format_bytes

STRATEGY_NAMES = {
    "layer_wise": "by layers",
    "tensor_parallel": "by tensors",
    "expert_parallel": "by experts",
    "data_parallel": "copies",
}


def describe(
    model: Annotated[
        str,
        typer.Argument(help="sample | FILE.gguf | FOLDER | hf:org/repo[@revision][:file] | a preset such as llama-3-70b:q4_k_m"),
    ] = "",
    kv_type: Annotated[str, typer.Option("--kv-type", help=f"Type of the KV cache: {', '.join(KV_TYPE_BYTES)}.")] = "f16",
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    list_presets: Annotated[bool, typer.Option("--list-presets", help="List the names that need no file.")] = False,
    tp: Annotated[
        str, typer.Option("--tp", help="Dry run of tensor parallelism over a folder: a degree, or shares such as 5,3.")
    ] = "",
) -> None:
    """Layers, bytes and FLOPs per layer, KV bytes per token, experts, quantization, what can be split how."""
    if list_presets:
        _show_presets(output())
        return
    if not model:
        raise UsageError("no MODEL was named", hint="name a file, a preset or 'sample'; see --list-presets", field="MODEL")
    if kv_type not in KV_TYPE_BYTES:
        hint = f"choose one of {', '.join(KV_TYPE_BYTES)}"
        raise UsageError(f"--kv-type '{kv_type}' is unknown", hint=hint, field="kv_type")
    if tp:
        _show_tensor_parallel(model, tp)
        return
    description = describe_model(model)
    out = output()
    if out.json:
        out.document(describe_as_data(description))
        return
    out.plain(_summary(description, kv_type))
    out.plain(_layer_table(description, kv_type))
    if tensors:
        out.plain(_tensor_table(description))
    out.plain(_split_table(description))


def _show_tensor_parallel(model: str, split: str) -> None:
    """What each rank would hold and send; nothing is loaded."""
    try:
        numbers = [float(part) for part in split.split(",")]
    except ValueError:
        raise UsageError(f"--tp {split}", hint="a degree such as 2, or shares such as 5,3", field="tp") from None
    from shardwise.tp import report_folder

    shares = numbers if len(numbers) > 1 else None
    report = report_folder(model, shares=shares, degree=len(numbers) if shares else int(numbers[0]))
    out = output()
    if out.json:
        out.document(report.as_dict())
        return
    for line in report.lines():
        out.plain(line)


def _show_presets(out: Output) -> None:
    known = presets().values()
    if out.json:
        data = [{"name": p.name, "title": p.title, "num_params": p.num_params, "aliases": p.aliases} for p in known]
        out.document({"presets": data})
        return
    table = Table("preset", "model", "weights", "unless you say", box=None, pad_edge=False)
    for preset in known:
        table.add_row(preset.name, preset.title, format_count(preset.num_params), preset.quantization)
    out.plain(table)


def format_count(value: float) -> str:
    """`134.5 M`, `70.6 B`."""
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value:.0f}"


def _summary(model: ModelDescription, kv_type: str) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    active, total = active_params(model), model.num_params
    sparse = any(layer.experts for layer in model.layers)
    params = f"{format_count(total)}" + (f", of which a token meets {format_count(active)}" if sparse else "")
    table.add_row("model", f"{model.name} ({model.architecture}, {model.quantization})")
    table.add_row("weights", f"{params}; {format_bytes(model.weight_bytes)}" + _parts(model))
    table.add_row("layers", f"{model.num_layers} of width {model.hidden_size}, {model.num_heads} heads")
    table.add_row(
        "first stage", f"{format_bytes(sum(t.num_bytes for t in model.embedding))} of token embedding besides its layers"
    )
    tied = ", the token embedding again" if model.tied_embeddings else ""
    table.add_row("last stage", f"{format_bytes(model.head_bytes)} of head besides its layers{tied}")
    at_end = flops_per_token(model, model.context_length)
    table.add_row(
        "compute", f"{format_count(flops_per_token(model))}FLOP a token, {format_count(at_end)}FLOP at the full context"
    )
    table.add_row("KV cache", _kv_text(model, kv_type))
    table.add_row("context", f"{model.context_length} tokens")
    table.add_row("tokenizer", _tokenizer_text(model))
    if model.revision_digest:
        table.add_row("revision", model.revision_digest)
    return table


def _parts(model: ModelDescription) -> str:
    text = f" in {len(model.source.paths)} files" if len(model.source.paths) > 1 else ""
    unused = sum(t.num_bytes for t in model.unused)
    return text + (f", {format_bytes(unused)} of them unused" if unused else "")


def _kv_text(model: ModelDescription, kv_type: str) -> str:
    chosen = [kv_type] + [kind for kind in ("q8_0", "q4_0") if kind != kv_type]
    per_token = ", ".join(f"{format_bytes(model.kv_bytes_per_token(kv_type=kind))} ({kind})" for kind in chosen)
    full = format_bytes(kv_bytes(model, model.context_length, kv_type))
    return f"{per_token} a token; {full} ({kv_type}) for one session at the full context"


def _tokenizer_text(model: ModelDescription) -> str:
    tokenizer = model.tokenizer
    template = "with chat template" if tokenizer.chat_template else "no chat template"
    digest = f", {tokenizer.digest[:16]}" if tokenizer.digest else ""
    return f"{tokenizer.kind or 'unknown'}, {tokenizer.vocab_size} tokens, {template}{digest}"


def _table(title: str, *names: str, whole: tuple[str, ...]) -> Table:
    """Nothing is cut on 80 columns: the columns in `whole` keep to one line, the others go on in the next."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=name in whole, overflow="fold")
    return table


def _layer_table(model: ModelDescription, kv_type: str) -> Table:
    sparse = any(layer.experts for layer in model.layers)
    names = ("layers", "each", "by quant-\nization", "FLOP\na token", f"KV a token\n({kv_type})", "keeps")
    table = _table("Layers (equal ones together)", *names, *(("experts",) if sparse else ()), whole=names[1:2] + names[3:5])
    for group in group_layers(model):
        table.add_row(*_layer_row(group, kv_type, sparse))
    return table


def _layer_row(group: LayerGroup, kv_type: str, sparse: bool) -> list[str]:
    layer = group.example
    kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in _largest_first(layer))
    row = [
        f"{group.ranges} ({len(group.indices)})",
        format_bytes(layer.weight_bytes),
        kinds,
        format_count(layer.flops_per_token),
        format_bytes(layer.kv.bytes_per_token(kv_type)),
        _keeps(layer),
    ]
    if sparse:
        spec = layer.experts
        shared = f" + {spec.num_shared} shared" if spec and spec.num_shared else ""
        row.append(f"{spec.num_active} of {spec.num_experts}{shared}, {format_bytes(spec.expert_bytes)} each" if spec else "none")
    return row


def _largest_first(layer: LayerDescription) -> list[tuple[str, int]]:
    return sorted(layer.weight_bytes_by_quantization.items(), key=lambda item: -item[1])


def _keeps(layer: LayerDescription) -> str:
    """What the layer remembers."""
    parts = []
    if layer.kv.elements_per_token():
        parts.append(f"{layer.kv.window_tokens} tokens" if layer.kv.window_tokens else "all tokens")
    if layer.kv.state_bytes:
        parts.append(f"{format_bytes(layer.kv.state_bytes)} of state")
    return " and ".join(parts) or "nothing"


def _tensor_table(model: ModelDescription) -> Table:
    names = ("tensor", "shape", "quantization", "bytes")
    table = _table("Tensors", *names, whole=names[1:])
    for tensor in model.all_tensors():
        table.add_row(tensor.name, " x ".join(map(str, tensor.shape)), tensor.quantization, format_bytes(tensor.num_bytes))
    return table


def _split_table(model: ModelDescription) -> Table:
    names = ("how", "machines", "equal shares", "note")
    table = _table("What can be split how", *names, whole=names[:2])
    for option in split_options(model):
        machines = f"up to {option.max_parts}" if option.possible and option.max_parts < 1 << 16 else "any"
        even = ", ".join(map(str, option.even_parts[:8]))
        table.add_row(STRATEGY_NAMES[option.strategy], machines if option.possible else "no", even, option.note)
    return table
