"""Who a model is: digests that two machines can compare before they believe that they hold the same weights.

`revision_digest` must be quick for 400 GB, so it does not read the weights. It is the SHA-256 of, for each part: the
size of the file, all bytes before the first weight (every metadata value, every tensor's name, shape, type and
place), and samples of 4 KiB spread evenly over the weights, 16 in all and at least one a part. Two fine-tunes with
equal headers differ in almost every sample; a file in which a few bytes have rotted does not, and that is what
`file_sha256` and the manifest's digest of each slice are for. The same digest comes out for a file on disk and for
one behind a server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from shardwise.errors import ModelError
from shardwise.model.byte_source import ByteSource, for_each
from shardwise.model.gguf_header import GgufHeader

NUM_SAMPLES = 16
SAMPLE_BYTES = 4096
_TOKENIZER_KEYS = ("tokenizer.ggml.", "tokenizer.huggingface.", "tokenizer.rwkv.")
_CHUNK_BYTES = 1 << 20


def revision_digest(parts: Sequence[tuple[ByteSource, int]]) -> str:
    """Identity (hex) from (file, bytes before its weights) of each part."""
    digest = hashlib.sha256(b"shardwise revision 1")
    per_part = max(NUM_SAMPLES // max(len(parts), 1), 1)
    spans: list[tuple[ByteSource, int, int]] = []
    for source, header_bytes in parts:
        header_bytes = min(header_bytes, source.size_bytes)
        digest.update(source.size_bytes.to_bytes(8, "little"))
        spans.append((source, 0, header_bytes))
        for offset in sample_offsets(header_bytes, source.size_bytes, per_part):
            spans.append((source, offset, min(SAMPLE_BYTES, source.size_bytes - offset)))
    parallel = any(source.is_remote for source, _ in parts)
    for data in for_each(lambda span: span[0].read(span[1], span[2]), spans, parallel=parallel):
        digest.update(data)
    return digest.hexdigest()


def sample_offsets(start: int, end: int, count: int) -> list[int]:
    """Where the samples of the bytes [start, end) begin; fewer where these bytes are few."""
    room = max(end - start - SAMPLE_BYTES, 0)
    return sorted({start + room * (i + 1) // (count + 1) for i in range(count)}) if end > start else []


def gguf_digest(headers: list[GgufHeader]) -> str:
    """`revision_digest` of a GGUF model."""
    return revision_digest([(header.source, header.data_offset_bytes) for header in headers])


def tokenizer_digest(header: GgufHeader) -> str:
    """SHA-256 of everything that changes token ids (vocabulary, merges, scores, types, special tokens); "" without any."""
    keys = sorted(key for key in header.metadata if key.startswith(_TOKENIZER_KEYS))
    if not any(key.startswith("tokenizer.ggml.tokens") or key == "tokenizer.huggingface.json" for key in keys):
        return ""
    digest = hashlib.sha256()
    for key in keys:
        raw = header.raw(key)
        digest.update(f"{key}\0{header.metadata[key].type.name}\0{len(raw)}\0".encode())
        digest.update(raw)
    return digest.hexdigest()


def file_sha256(path: str | Path, progress: Callable[[int], None] | None = None) -> str:
    """SHA-256 (hex) of a whole file; `progress` is told of bytes done."""
    digest = hashlib.sha256()
    try:
        with Path(path).open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                if progress is not None:
                    progress(len(chunk))
    except OSError as error:
        raise ModelError(f"cannot read the file: {error.strerror}", where=str(path)) from error
    return digest.hexdigest()
