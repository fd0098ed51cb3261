"""What a slice file holds, decided from the source's header alone: pure, writes nothing.

In: a `GgufSource`, the architecture's facts, a range of layers. Out: metadata entries and the list of tensors.

- `block_count` is the slice's length, `blk.N` is renumbered from 0, per-layer arrays are cut.
- Every slice but the last goes without a vocabulary (`no_vocab`, one row of `token_embd`, no head): llama.cpp then
  neither keeps the embedding nor computes logits.
- The last slice keeps tokenizer, final norm and head. Where llama.cpp takes `token_embd` as the head when there is no
  `output.weight`, a separate head is stored under that name, so that the unused embedding needs no space; other
  architectures need both, and carry the embedding along.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from shardwise.model.families import (
    ATTENTION,
    DEEPSTACK,
    LEADING_LAYER_KEYS,
    OTHER,
    PER_LAYER_KEYS,
    PER_LAYER_PLAIN_KEYS,
    RECURRENT,
    WINDOWED,
    Family,
)
from shardwise.model.gguf_header import GgufType, Scalar
from shardwise.shards.gguf_source import GgufSource, SourceTensor
from shardwise.shards.gguf_writer import OutTensor, encode_entry

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
HEAD_BIAS = "output.bias"
ROPE_FACTORS = "rope_freqs.weight"
PATTERN = "attention.sliding_window_pattern"
RECURRENT_KEY = "attention.recurrent_layers"
NEXTN = "nextn_predict_layers"  # layers for multi-token prediction, at the end; slices go without them
_LAYER = re.compile(r"^blk\.(\d+)\.(.+)$")
_F32 = 0  # ggml's number of the type


def slice_entries(source: GgufSource, family: Family, start: int, end: int, num_layers: int) -> list[bytes]:
    """The slice's metadata: the source's bytes where nothing changes."""
    is_last = end == num_layers
    changed = _changed_values(source, family, start, end, num_layers)
    out = [encode_entry(key, kind, value) for key, (kind, value) in changed.items()]
    for key in source.keys:
        dropped = key.startswith(("split.", "general.alignment")) or (key.startswith("tokenizer.") and not is_last)
        if not dropped and key not in changed:
            out.append(_cut_entry(source, key, start, end, num_layers))
    return out


def _changed_values(source: GgufSource, family: Family, start: int, end: int, num_layers: int) -> dict[str, tuple[GgufType, Any]]:
    """Entries that a slice states anew."""
    out: dict[str, tuple[GgufType, Any]] = {
        "general.architecture": (GgufType.STRING, source.architecture),
        source.own_key("block_count"): (GgufType.UINT32, end - start),
    }
    if end < num_layers:
        out["tokenizer.ggml.model"] = (GgufType.STRING, "no_vocab")
        out[source.own_key("vocab_size")] = (GgufType.UINT32, 1)
    if start > 0:
        for name, value in family.neutral_metadata.items():
            if source.has(name):
                out[source.own_key(name)] = (GgufType.FLOAT32, value)
    for name, number in family.default_metadata.items():
        if not source.has(name):
            out[source.own_key(name)] = (GgufType.UINT32, number)
    if start > 0 and family.without_rows_of_images and source.has(DEEPSTACK):
        out[source.own_key(DEEPSTACK)] = (GgufType.UINT32, 0)
    if source.has(NEXTN):
        out[source.own_key(NEXTN)] = (GgufType.UINT32, 0)
    for name in LEADING_LAYER_KEYS:
        if source.has(name):
            out[source.own_key(name)] = (GgufType.UINT32, max(0, source.integer(name) - start))
    window = _window_pattern(source, family, num_layers)
    if window is not None:
        out[source.own_key(PATTERN)] = (GgufType.BOOL, window[start:end])
    kinds = layer_kinds(source, family, num_layers) if family.recurrent_interval else None
    if kinds is not None:
        out[source.own_key(RECURRENT_KEY)] = (GgufType.BOOL, [kind == RECURRENT for kind in kinds[start:end]])
    return out


def layer_kinds(source: GgufSource, family: Family, num_layers: int) -> list[str] | None:
    """What each layer is, as llama.cpp decides it; None where all are the same."""
    if not family.hybrid:
        windows = _window_pattern(source, family, num_layers)
        return None if windows is None else [WINDOWED if window else ATTENTION for window in windows]
    key = source.own_key(RECURRENT_KEY)
    if source.element_type(key) is not None:
        return [RECURRENT if x else ATTENTION for x in _per_layer(source, key, num_layers)]
    if family.recurrent_interval:
        return [RECURRENT if (i + 1) % family.recurrent_interval else ATTENTION for i in range(num_layers)]
    kv_heads = source.header.integers(source.own_key("attention.head_count_kv"), num_layers)
    if not family.layers_of_one_part:
        return [ATTENTION if heads else RECURRENT for heads in kv_heads]
    widths = source.header.integers(source.own_key("feed_forward_length"), num_layers)
    return [OTHER if width else ATTENTION if heads else RECURRENT for heads, width in zip(kv_heads, widths, strict=True)]


def _window_pattern(source: GgufSource, family: Family, num_layers: int) -> list[bool] | None:
    """Which layers of the model are windowed, as llama.cpp would derive it; None where no pattern applies."""
    rule = family.sliding_window
    if source.element_type(source.own_key(PATTERN)) is not None:
        return [bool(x) for x in _per_layer(source, source.own_key(PATTERN), num_layers)]
    if rule is None or (rule.requires_key and not source.integer("attention.sliding_window", 0)):
        return None
    period = source.integer(PATTERN, rule.period)
    full_at = 0 if rule.dense_first else period - 1
    return [period == 0 or index % period != full_at for index in range(num_layers)]


def _cut_entry(source: GgufSource, key: str, start: int, end: int, num_layers: int) -> bytes:
    """Per-layer arrays are cut, everything else keeps its bytes."""
    own, _, name = key.partition(".")
    kind = source.element_type(key)
    per_layer = key in PER_LAYER_PLAIN_KEYS or (own == source.architecture and name in PER_LAYER_KEYS)
    if not per_layer or kind is None:
        return source.entry(key)
    return encode_entry(key, kind, _per_layer(source, key, num_layers)[start:end])


def _per_layer(source: GgufSource, key: str, num_layers: int) -> list[Scalar]:
    values = source.array(key)
    if len(values) < num_layers:
        raise source.header.complaint(f"the key '{key}' has {len(values)} elements for {num_layers} layers")
    return values


def slice_tensors(source: GgufSource, family: Family, start: int, end: int, num_layers: int) -> list[OutTensor]:
    """The slice's tensors, in the source's order."""
    is_last = end == num_layers
    out: list[OutTensor] = []
    for tensor in source.tensors.values():
        name = _layer_name(tensor.name, start, end)
        if name is not None:
            out.append(_copied(tensor, name))
    missing = set(range(end - start)).difference(int(t.name.split(".")[1]) for t in out)
    if missing:
        raise source.header.complaint(f"layer {start + min(missing)} of {num_layers} has no tensors")
    own_head = HEAD in source.tensors
    for name, tensor in source.tensors.items():
        if _LAYER.match(name):
            continue
        if name == EMBEDDING:
            out.extend(_embedding(source, tensor, is_last, replaced_by_head=own_head and family.output_optional))
        elif name == HEAD:
            out.extend(_head(tensor, is_last, family.output_optional))
        elif name == HEAD_BIAS and not is_last:
            out.append(OutTensor(name, (1,), _F32, 4, None))
        elif name == ROPE_FACTORS and family.rope_factors_of_full_layers and all(_windows(source, start, end)):
            continue
        else:
            out.append(_copied(tensor, name))
    return out


def _windows(source: GgufSource, start: int, end: int) -> list[bool]:
    return [bool(x) for x in source.array(source.own_key(PATTERN))[start:end]]


def _layer_name(name: str, start: int, end: int) -> str | None:
    match = _LAYER.match(name)
    if match is None or not start <= int(match[1]) < end:
        return None
    return f"blk.{int(match[1]) - start}.{match[2]}"


def _embedding(source: GgufSource, tensor: SourceTensor, is_last: bool, *, replaced_by_head: bool) -> Iterator[OutTensor]:
    if not is_last:
        yield _one_row(tensor)
    elif replaced_by_head:
        yield _copied(source.tensors[HEAD], EMBEDDING)
    else:
        yield _copied(tensor, EMBEDDING)


def _head(tensor: SourceTensor, is_last: bool, optional: bool) -> Iterator[OutTensor]:
    if optional:
        return
    yield _copied(tensor, HEAD) if is_last else _one_row(tensor)


def _one_row(tensor: SourceTensor) -> OutTensor:
    return OutTensor(tensor.name, (tensor.shape[0], 1), _F32, 4 * tensor.shape[0], None)


def _copied(tensor: SourceTensor, name: str) -> OutTensor:
    return OutTensor(name, tensor.shape, tensor.type_id, tensor.num_bytes, tensor.path, tensor.offset_bytes)


def embedding_tensors(source: GgufSource) -> list[OutTensor]:
    """The embedding matrix alone."""
    return [_copied(source.tensors[EMBEDDING], EMBEDDING)]


def embedding_entries(source: GgufSource) -> list[bytes]:
    """Metadata of the embedding file: enough to say where it came from."""
    keep = ("general.architecture", "general.name", source.own_key("embedding_length"))
    return [source.entry(key) for key in keep if key in source.keys]
