"""A GGUF whose matrices are holes in the file: large to read, nothing on the disk."""

from __future__ import annotations

from pathlib import Path

from shardwise.model.gguf_header import GgufType
from shardwise.shards.gguf_writer import OutTensor, encode_entry, encode_header, file_bytes

_F32 = 0


def write_sparse_llama(path: Path, *, matrix_bytes: int) -> None:
    """Two layers; the embedding and one matrix of layer 0 have `matrix_bytes` each."""
    width = 1024
    rows = matrix_bytes // (4 * width)
    shapes = {
        "token_embd.weight": (width, rows),
        "blk.0.ffn_up.weight": (width, rows),
        "blk.0.attn_norm.weight": (width,),
        "blk.1.attn_norm.weight": (width,),
        "output_norm.weight": (width,),
    }
    tensors = [
        OutTensor(name, shape, _F32, 4 * shape[0] * (shape[1] if len(shape) > 1 else 1), None) for name, shape in shapes.items()
    ]
    entries = [
        encode_entry("general.architecture", GgufType.STRING, "llama"),
        encode_entry("llama.block_count", GgufType.UINT32, 2),
        encode_entry("llama.embedding_length", GgufType.UINT32, width),
    ]
    header = encode_header(entries, tensors)
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(file_bytes(header, tensors))
