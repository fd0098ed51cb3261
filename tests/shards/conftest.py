"""A tiny GGUF model with 30 layers and random weights: about 1 MB, every kind of piece in it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from shardwise.shards.manifest import ManifestSettings

NUM_LAYERS = 30
HIDDEN = 32
VOCAB = 3000  # the vocabulary is large enough to be a piece of its own
ROWS = {"attn_q": HIDDEN, "attn_k": 16, "attn_v": 16, "attn_output": HIDDEN, "ffn_gate": 64, "ffn_up": 64}
SETTINGS = ManifestSettings(protocol_version=1)


def write_tiny_model(
    path: Path,
    *,
    seed: int = 0,
    tied: bool = True,
    num_layers: int = NUM_LAYERS,
    token: str = "token",
    half: bool = False,
) -> Path:
    """A llama whose tensors lie as llama.cpp's converter puts them."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(num_layers)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // 4)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"{token} number {i} of the tiny model" for i in range(VOCAB)])
    writer.add_token_scores([float(-i) for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)

    def add(name: str, *shape: int) -> None:
        kind = np.float16 if half and len(shape) == 2 else np.float32
        writer.add_tensor(name, rng.standard_normal(shape).astype(kind))

    add("token_embd.weight", VOCAB, HIDDEN)
    for layer in range(num_layers):
        for name, rows in ROWS.items():
            add(f"blk.{layer}.{name}.weight", rows, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, 64)
        add(f"blk.{layer}.attn_norm.weight", HIDDEN)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN)
    add("output_norm.weight", HIDDEN)
    add("rope_freqs.weight", HIDDEN // 8)  # not a multiple of the alignment: padding follows
    if not tied:
        add("output.weight", VOCAB, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of its own."""
    return write_tiny_model(tmp_path_factory.mktemp("untied") / "untied.gguf", tied=False, seed=1)
