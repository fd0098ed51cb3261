"""GGUF files byte by byte, so that they can lie. Nothing of shardwise or `gguf` is used here."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", 11: "q", 12: "d"}
SIZES = {0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34)}  # F32, F16, Q4_0, Q8_0


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(kind: int, content: Any) -> bytes:
    """A value with its type; an array's content is (element type, elements)."""
    return struct.pack("<I", kind) + payload(kind, content)


def payload(kind: int, content: Any) -> bytes:
    if content is None:
        return b""  # of a type that does not exist
    if kind == STRING:
        return string(content)
    if kind == ARRAY:
        inner, elements = content
        return struct.pack("<IQ", inner, len(elements)) + b"".join(payload(inner, element) for element in elements)
    return struct.pack("<" + _FORMATS[kind], content)


@dataclass
class Tensor:
    name: str
    shape: tuple[int, ...]
    type_id: int = 0
    offset: int | None = None  # None: behind the one before, as it should be

    @property
    def num_bytes(self) -> int:
        elements, size = SIZES.get(self.type_id, (1, 1))
        count = 1
        for dim in self.shape:
            count *= max(dim, 0)
        return count // elements * size


@dataclass
class GgufFile:
    """Everything can be set to something wrong before `build`."""

    keys: dict[str, tuple[int, Any]] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_keys: int | None = None
    alignment: int = 32
    data: bytes | None = None

    def header(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_keys = len(self.keys) if self.num_keys is None else self.num_keys
        parts = [self.magic, struct.pack("<IQQ", self.version, num_tensors, num_keys)]
        parts += [string(key) + value(kind, content) for key, (kind, content) in self.keys.items()]
        position = 0
        for tensor in self.tensors:
            offset = position if tensor.offset is None else tensor.offset
            dims = struct.pack(f"<I{len(tensor.shape)}q", len(tensor.shape), *tensor.shape)
            parts.append(string(tensor.name) + dims + struct.pack("<IQ", tensor.type_id, offset))
            position = min(position + self.padded(tensor.num_bytes), 1 << 60)
        header = b"".join(parts)
        return header + bytes(-len(header) % self.alignment)

    def padded(self, size: int) -> int:
        return size + (-size % self.alignment)

    def build(self) -> bytes:
        size = min(sum(self.padded(t.num_bytes) for t in self.tensors), 1 << 20)
        return self.header() + (bytes(size) if self.data is None else self.data)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.build())
        return path


def llama_keys(num_layers: int, **changes: tuple[int, Any]) -> dict[str, tuple[int, Any]]:
    """Metadata of a llama with 2 heads of 16."""
    tokens = ["a", "b", "c", "d"]
    keys: dict[str, tuple[int, Any]] = {
        "general.architecture": (STRING, "llama"),
        "general.name": (STRING, "small"),
        "llama.block_count": (U32, num_layers),
        "llama.context_length": (U32, 64),
        "llama.embedding_length": (U32, 32),
        "llama.feed_forward_length": (U32, 64),
        "llama.attention.head_count": (U32, 2),
        "llama.attention.head_count_kv": (U32, 1),
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (I32, [1, 1, 1, 1])),
        "tokenizer.ggml.merges": (ARRAY, (STRING, ["a b"])),
        "tokenizer.chat_template": (STRING, "{{ messages }}"),
    }
    return keys | changes


def llama_tensors(num_layers: int) -> list[Tensor]:
    """Tensors of that llama; the head is the embedding."""
    tensors = [Tensor("token_embd.weight", (32, 4), 8), Tensor("output_norm.weight", (32,))]
    for index in range(num_layers):
        tensors += [
            Tensor(f"blk.{index}.attn_norm.weight", (32,)),
            Tensor(f"blk.{index}.attn_q.weight", (32, 32), 2),
            Tensor(f"blk.{index}.attn_k.weight", (32, 16), 2),
            Tensor(f"blk.{index}.attn_v.weight", (32, 16), 2),
            Tensor(f"blk.{index}.attn_output.weight", (32, 32), 2),
            Tensor(f"blk.{index}.ffn_up.weight", (32, 64), 8),
            Tensor(f"blk.{index}.ffn_down.weight", (64, 32), 8),
        ]
    return tensors


def small_llama(num_layers: int = 2) -> GgufFile:
    """A whole, honest file of about 12 KB."""
    return GgufFile(keys=llama_keys(num_layers), tensors=llama_tensors(num_layers))
