"""Hugging Face folders of a small llama, written byte by byte."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

Shape = tuple[int, ...]
WIDTH, FFN, VOCAB = 64, 128, 96
SIZES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "I32": 4}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}


def llama_shapes(num_layers: int = 3) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    shapes["lm_head.weight"] = (VOCAB, WIDTH)
    for index in range(num_layers):
        layer: dict[str, Shape] = {
            "input_layernorm": (WIDTH,),
            "self_attn.q_proj": (WIDTH, WIDTH),
            "self_attn.k_proj": (WIDTH // 2, WIDTH),
            "self_attn.v_proj": (WIDTH // 2, WIDTH),
            "self_attn.o_proj": (WIDTH, WIDTH),
            "mlp.gate_proj": (FFN, WIDTH),
            "mlp.up_proj": (FFN, WIDTH),
            "mlp.down_proj": (WIDTH, FFN),
        }
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def safetensors_bytes(shapes: dict[str, Shape], dtype: str = "BF16", **changes: Any) -> bytes:
    """A file of zeros; `changes` replace whole header entries."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + count * SIZES[dtype]]}
        position += count * SIZES[dtype]
    text = json.dumps(header | changes).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(position)


def write_llama_folder(folder: Path, *, num_files: int = 2, config: dict[str, Any] | None = None) -> Path:
    """config.json, weights in `num_files` files with an index, and a tokenizer."""
    folder.mkdir(exist_ok=True)
    shapes = llama_shapes()
    names = list(shapes)
    weight_map: dict[str, str] = {}
    for number in range(num_files):
        part = {name: shapes[name] for name in names[number::num_files]}
        file = "model.safetensors" if num_files == 1 else f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        (folder / file).write_bytes(safetensors_bytes(part))
        weight_map |= dict.fromkeys(part, file)
    if num_files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "chat_template": "{{ x }}"}')
    return folder
