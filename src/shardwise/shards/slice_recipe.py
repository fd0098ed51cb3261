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

from gguf import GGMLQuantizationType, GGUFValueType

from shardwise.errors import MalformedModelError
from shardwise.model.families import LEADING_LAYER_KEYS, PER_LAYER_KEYS, Family
from shardwise.shards.gguf_source import GgufSource, SourceTensor
from shardwise.shards.gguf_writer import OutTensor, encode_entry

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
HEAD_BIAS = "output.bias"
_LAYER = re.compile(r"^blk\.(\d+)\.(.+)$")
_F32 = int(GGMLQuantizationType.F32)


def slice_entries(source: GgufSource, family: Family, start: int, end: int, num_layers: int) -> list[bytes]:
    """The slice's metadata: the source's bytes where nothing changes."""
    prefix = f"{source.architecture}."
    is_last = end == num_layers
    changed = _changed_values(source, family, start, end, num_layers)
    out = [encode_entry(key, kind, value) for key, (kind, value) in changed.items()]
    for key, raw in source.entries.items():
        dropped = key.startswith(("split.", "general.alignment")) or (key.startswith("tokenizer.") and not is_last)
        if not dropped and key not in changed:
            out.append(_cut_entry(source, key, raw, prefix, start, end, num_layers))
    return out


def _changed_values(
    source: GgufSource, family: Family, start: int, end: int, num_layers: int
) -> dict[str, tuple[GGUFValueType, Any]]:
    """Entries that a slice states anew."""
    arch = source.architecture
    out: dict[str, tuple[GGUFValueType, Any]] = {
        "general.architecture": (GGUFValueType.STRING, arch),
        f"{arch}.block_count": (GGUFValueType.UINT32, end - start),
    }
    if end < num_layers:
        out["tokenizer.ggml.model"] = (GGUFValueType.STRING, "no_vocab")
        out[f"{arch}.vocab_size"] = (GGUFValueType.UINT32, 1)
    if start > 0:
        for key, value in family.neutral_metadata.items():
            if f"{arch}.{key}" in source.entries:
                out[f"{arch}.{key}"] = (GGUFValueType.FLOAT32, value)
    for key in LEADING_LAYER_KEYS:
        if f"{arch}.{key}" in source.entries:
            left = max(0, int(source.value(f"{arch}.{key}")) - start)
            out[f"{arch}.{key}"] = (GGUFValueType.UINT32, left)
    window = _window_pattern(source, family, num_layers)
    if window is not None:
        out[f"{arch}.attention.sliding_window_pattern"] = (GGUFValueType.BOOL, window[start:end])
    return out


def _window_pattern(source: GgufSource, family: Family, num_layers: int) -> list[bool] | None:
    """Which layers of the model are windowed, as llama.cpp would derive it; None where no pattern applies."""
    rule = family.sliding_window
    key = f"{source.architecture}.attention.sliding_window_pattern"
    if source.is_array(key):
        return [bool(x) for x in source.value(key)]
    if rule is None or (rule.requires_key and not source.value(f"{source.architecture}.attention.sliding_window")):
        return None
    period = int(source.value(key, rule.period))
    full_at = 0 if rule.dense_first else period - 1
    return [period == 0 or index % period != full_at for index in range(num_layers)]


def _cut_entry(source: GgufSource, key: str, raw: bytes, prefix: str, start: int, end: int, num_layers: int) -> bytes:
    """Per-layer arrays are cut, everything else keeps its bytes."""
    if key.removeprefix(prefix) not in PER_LAYER_KEYS or not key.startswith(prefix) or not source.is_array(key):
        return raw
    values = source.value(key)
    kind = source.value_type(key)
    if len(values) != num_layers or kind is None:
        raise MalformedModelError(f"'{key}' has {len(values)} elements for {num_layers} layers", where=str(source.paths[0]))
    return encode_entry(key, kind, values[start:end])


def slice_tensors(source: GgufSource, family: Family, start: int, end: int, num_layers: int) -> list[OutTensor]:
    """The slice's tensors, in the source's order."""
    is_last = end == num_layers
    out: list[OutTensor] = []
    for tensor in source.tensors.values():
        name = _layer_name(tensor.name, start, end)
        if name is not None:
            out.append(_copied(tensor, name))
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
        else:
            out.append(_copied(tensor, name))
    return out


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
    keep = ("general.architecture", "general.name", f"{source.architecture}.embedding_length")
    return [source.entries[key] for key in keep if key in source.entries]
