"""Hugging Face folders: real ones saved by transformers, and ones that lie."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import MalformedModelError, ModelError, UnsupportedModelError
from shardwise.model import describe_model
from shardwise.model.hf_config import HfConfig
from shardwise.model.huggingface import describe_folder
from shardwise.model.safetensors_header import read_safetensors_header
from tests.model.hf_folder import CONFIG, FFN, VOCAB, WIDTH, llama_shapes, safetensors_bytes, write_llama_folder
from tests.model.memory_file import MemoryFile


def test_a_folder_of_two_files(tmp_path: Path) -> None:
    model = describe_folder(write_llama_folder(tmp_path / "m"))
    assert (model.num_layers, model.hidden_size, model.num_heads, model.vocab_size) == (3, WIDTH, 4, VOCAB)
    assert (model.architecture, model.quantization, model.tied_embeddings) == ("llama", "BF16", False)
    matrices = 2 * WIDTH * WIDTH + WIDTH * WIDTH + 3 * WIDTH * FFN
    assert [layer.flops_per_token for layer in model.layers] == [2.0 * matrices] * 3
    assert model.layers[0].kv.elements_per_token() == 2 * 2 * 16
    assert (model.tokenizer.kind, model.tokenizer.bos_id, model.tokenizer.eos_id) == ("LlamaTokenizer", 1, 2)
    assert model.tokenizer.chat_template == "{{ x }}"
    assert [t.name for t in model.embedding] == ["model.embed_tokens.weight"]
    assert {t.name for t in model.output} == {"model.norm.weight", "lm_head.weight"}
    assert {t.file_index for t in model.all_tensors()} == {0, 1}


def test_the_same_model_in_one_file_costs_the_same(tmp_path: Path) -> None:
    two = describe_folder(write_llama_folder(tmp_path / "2"))
    one = describe_folder(write_llama_folder(tmp_path / "1", num_files=1))
    assert one.weight_bytes == two.weight_bytes
    assert one.tokenizer.digest == two.tokenizer.digest


REAL: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "Qwen3MoeConfig": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
    "Gemma2Config": {"head_dim": 16, "sliding_window": 8},
    "MixtralConfig": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GPTNeoXConfig": {},
    "DeepseekV3Config": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "BloomConfig": {"n_layer": 3, "n_head": 4},
    "OPTConfig": {"ffn_dim": 128, "word_embed_proj_dim": 64},
}


@pytest.mark.parametrize("name", REAL)
@pytest.mark.filterwarnings("ignore")
def test_models_saved_by_transformers(name: str, tmp_path: Path) -> None:
    """Parameters as transformers counts them, and the live module described like its folder."""
    import transformers

    common = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}
    common |= {"num_key_value_heads": 4 if name == "DeepseekV3Config" else 2, "max_position_embeddings": 128}
    config = getattr(transformers, name)(**(common | REAL[name]))
    live = transformers.AutoModelForCausalLM.from_config(config)
    live.save_pretrained(tmp_path, max_shard_size="200KB")
    model = describe_folder(tmp_path)
    saved = {id(t): t.numel() for t in live.state_dict(keep_vars=True).values()}  # with DeepSeek's correction biases
    assert model.num_params == sum(saved.values())
    assert model.num_layers == 3
    assert model.tied_embeddings == bool(live.config.tie_word_embeddings)
    module = describe_model(live)
    assert module.num_params == model.num_params
    assert [layer.flops_per_token for layer in module.layers] == [layer.flops_per_token for layer in model.layers]
    assert [layer.kv for layer in module.layers] == [layer.kv for layer in model.layers]
    assert module.tied_embeddings == model.tied_embeddings
    has_experts = [layer.experts is not None for layer in model.layers]
    assert any(has_experts) == ("Moe" in name or "Mixtral" in name or "Deepseek" in name)
    assert has_experts == [layer.experts is not None for layer in module.layers]


KV_FACTS: list[tuple[dict[str, Any], list[tuple[int, int, int, int | None]]]] = [
    ({"sliding_window": 8}, [(2, 16, 16, 8)] * 3),
    ({"sliding_window": 8, "use_sliding_window": False}, [(2, 16, 16, None)] * 3),
    ({"sliding_window": 8, "max_window_layers": 2}, [(2, 16, 16, None)] * 2 + [(2, 16, 16, 8)]),
    (
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        [(2, 16, 16, 8), (2, 16, 16, None), (2, 16, 16, 8)],
    ),
    ({"kv_lora_rank": 16, "qk_rope_head_dim": 8}, [(1, 24, 0, None)] * 3),
    ({"head_dim": 32}, [(2, 32, 32, None)] * 3),
    ({"num_key_value_heads": None}, [(4, 16, 16, None)] * 3),
    ({"multi_query": True}, [(1, 16, 16, None)] * 3),
]


@pytest.mark.parametrize(("changes", "expected"), KV_FACTS)
def test_what_layers_keep(changes: dict[str, Any], expected: list[tuple[int, int, int, int | None]]) -> None:
    config = HfConfig(CONFIG | changes, "config.json")
    found = [config.attention(i, {"self_attn.k_proj.weight"}).kv for i in range(3)]
    assert [(kv.num_kv_heads, kv.key_dim, kv.value_dim, kv.window_tokens) for kv in found] == expected


def test_packed_weights_count_what_is_in_them(tmp_path: Path) -> None:
    folder = write_llama_folder(tmp_path, num_files=1, config={"quantization_config": {"quant_method": "gptq", "bits": 4}})
    shapes = llama_shapes()
    data = safetensors_bytes(shapes)
    plain = describe_folder(folder).layers[0].flops_per_token
    packed = {n.replace(".weight", ".qweight"): (s[0], s[1] // 8) for n, s in shapes.items() if "proj" in n}
    rest = {n: s for n, s in shapes.items() if "proj" not in n}
    (folder / "model.safetensors").write_bytes(data)
    files = {"model-1.safetensors": safetensors_bytes(packed, "I32"), "model-2.safetensors": safetensors_bytes(rest)}
    (folder / "model.safetensors").unlink()
    for file, content in files.items():
        (folder / file).write_bytes(content)
    model = describe_folder(folder)
    assert model.layers[0].flops_per_token == plain
    assert model.quantization == "INT4"


def broken(folder: Path, **files: str | bytes | None) -> Path:
    write_llama_folder(folder, num_files=1)
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def _header(**entries: Any) -> bytes:
    return safetensors_bytes(llama_shapes(), "BF16", **entries)


BROKEN: dict[str, tuple[dict[str, Any], type[ModelError], str]] = {
    "no config": ({"config__json": None}, ModelError, "no Hugging Face model"),
    "config is a list": ({"config__json": "[]"}, MalformedModelError, "no JSON object"),
    "config is cut off": ({"config__json": '{"a": '}, MalformedModelError, "no JSON"),
    "config nests too deeply": ({"config__json": '{"a":' + "[" * 200_000}, MalformedModelError, "no JSON"),
    "no layers": ({"config__json": '{"hidden_size": 64}'}, MalformedModelError, "num_hidden_layers"),
    "layers as text": ({"config__json": json.dumps(CONFIG | {"num_hidden_layers": "3"})}, MalformedModelError, "no possible"),
    "too many layers": ({"config__json": json.dumps(CONFIG | {"num_hidden_layers": 4})}, MalformedModelError, "layer 3 of 4"),
    "2^50 layers": ({"config__json": json.dumps(CONFIG | {"num_hidden_layers": 1 << 50})}, MalformedModelError, "no possible"),
    "no weights": ({"model__safetensors": None}, UnsupportedModelError, "no safetensors"),
    "empty weights": ({"model__safetensors": b""}, MalformedModelError, "no safetensors file"),
    "length of 2^60": ({"model__safetensors": struct.pack("<Q", 1 << 60)}, MalformedModelError, "claims"),
    "weights cut off": ({"model__safetensors": safetensors_bytes(llama_shapes())[:-1]}, MalformedModelError, "not complete"),
    "missing file": ({"model__safetensors__index__json": '{"weight_map": {"a": "b.safetensors"}}'}, ModelError, "1 of 1 weight"),
    "file outside": ({"model__safetensors__index__json": '{"weight_map": {"a": "../b"}}'}, ModelError, "are missing"),
    "no map": ({"model__safetensors__index__json": "{}"}, MalformedModelError, "no weight_map"),
    "unknown dtype": (
        {"model__safetensors": _header(x={"dtype": "F3", "shape": [1], "data_offsets": [0, 1]})},
        UnsupportedModelError,
        "unknown dtype 'F3'",
    ),
    "offsets backwards": (
        {"model__safetensors": _header(x={"dtype": "U8", "shape": [1], "data_offsets": [1, 0]})},
        MalformedModelError,
        "makes no sense",
    ),
    "negative shape": (
        {"model__safetensors": _header(x={"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]})},
        MalformedModelError,
        "makes no sense",
    ),
    "size that does not fit": (
        {"model__safetensors": _header(x={"dtype": "U8", "shape": [5], "data_offsets": [0, 1]})},
        MalformedModelError,
        "claims 1 bytes",
    ),
    "overlap": (
        {"model__safetensors": _header(x={"dtype": "U8", "shape": [5], "data_offsets": [0, 5]})},
        MalformedModelError,
        "overlap",
    ),
    "entry is a number": ({"model__safetensors": _header(x=5)}, MalformedModelError, "makes no sense"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_one_clear_line(name: str, tmp_path: Path) -> None:
    files, kind, message = BROKEN[name]
    with pytest.raises(kind, match=message) as caught:
        describe_folder(broken(tmp_path, **files))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    folder = broken(tmp_path, model__safetensors=None)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UnsupportedModelError, match="pickles are not read"):
        describe_folder(folder)


def test_a_folder_of_gguf_files_names_one(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelError) as caught:
        describe_model(tmp_path)
    assert str(tmp_path / "a.gguf") in caught.value.hint


HONEST = safetensors_bytes(llama_shapes())
HEADER_BYTES = 8 + struct.unpack("<Q", HONEST[:8])[0]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, HEADER_BYTES - 1), st.integers(0, 16), st.binary(max_size=16))
def test_any_damage_to_a_safetensors_header(position: int, removed: int, inserted: bytes) -> None:
    data = HONEST[:position] + inserted + HONEST[position + removed :]
    with contextlib.suppress(ModelError):
        read_safetensors_header(MemoryFile(data, "m.safetensors"))


def test_cut_off_at_every_byte() -> None:
    for length in range(0, len(HONEST), 61):
        with pytest.raises(MalformedModelError):
            read_safetensors_header(MemoryFile(HONEST[:length], "m.safetensors"))
