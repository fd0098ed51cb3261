"""Descriptions against what is known: of the sample, of tiny models with every kind of layer, and of llama.cpp's caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import MalformedModelError, ModelError
from shardwise.model import ModelDescription, describe_gguf, sample_path
from shardwise.model.identity import file_sha256
from shardwise.model.summary import active_params, flops_per_token, group_layers, kv_bytes
from tests.model.gguf_bytes import ARRAY, BOOL, STRING, U32, GgufFile, Tensor, llama_keys, llama_tensors, small_llama
from tests.model.llama_cpp_state import CacheSizes, cache_sizes
from tests.tiny_models import SPECS, make_tiny


@pytest.fixture(scope="module")
def sample() -> ModelDescription:
    return describe_gguf(sample_path())


def test_sizes_of_the_sample(sample: ModelDescription) -> None:
    """Figures from the model card and by hand: 30 layers of 576, 9 heads, 3 key heads of 64, SwiGLU of 1536, 49,152 tokens."""
    assert (sample.num_layers, sample.hidden_size, sample.num_heads, sample.vocab_size) == (30, 576, 9, 49152)
    assert sample.num_params == 134_515_008
    assert (sample.quantization, sample.tied_embeddings, sample.context_length) == ("Q4_1", True, 8192)
    layer = sample.layers[7]
    matrices = 576 * 576 * 2 + 576 * 192 * 2 + 3 * 576 * 1536
    assert layer.flops_per_token == 2 * matrices
    assert layer.weight_bytes == matrices * 20 // 32 + 2 * 576 * 4
    assert layer.attention_flops_per_position == 2 * 9 * (64 + 64)
    assert layer.kv.bytes_per_token("f16") == 2 * 3 * 64 * 2
    assert layer.kv.bytes_per_token("q8_0") == 2 * 3 * 64 * 34 / 32
    assert sample.weight_bytes == sum(t.num_bytes for t in sample.all_tensors())
    assert sample.weight_bytes <= sample_path().stat().st_size
    assert flops_per_token(sample) == pytest.approx(2 * sample.num_params, rel=0.001)


def test_stages_hold_everything_once_and_a_tied_embedding_twice(sample: ModelDescription) -> None:
    parts = [sample.stage_weight_bytes(a, b) for a, b in ((0, 10), (10, 20), (20, 30))]
    embedding = sum(t.num_bytes for t in sample.embedding)
    assert sum(parts) == sample.weight_bytes + embedding
    assert sample.stage_weight_bytes(0, 30) == sample.weight_bytes


def test_tokenizer_and_identity_of_the_sample(sample: ModelDescription, tmp_path: Path) -> None:
    assert (sample.tokenizer.kind, sample.tokenizer.vocab_size, sample.tokenizer.bos_id, sample.tokenizer.eos_id) == (
        "gpt2",
        49152,
        1,
        2,
    )
    assert "<|im_start|>" in (sample.tokenizer.chat_template or "")
    copy = tmp_path / "renamed.gguf"
    data = bytearray(sample_path().read_bytes())
    copy.write_bytes(data)
    again = describe_gguf(copy)
    assert (again.revision_digest, again.tokenizer.digest) == (sample.revision_digest, sample.tokenizer.digest)
    for position in range(len(data) // 2, len(data)):  # another fine-tune: the same header, other weights
        data[position] ^= 0x55
        if position > len(data) // 2 + 20_000_000:
            break
    copy.write_bytes(data)
    assert describe_gguf(copy).revision_digest != sample.revision_digest
    assert file_sha256(copy) != file_sha256(sample_path())


def test_a_changed_vocabulary_is_another_tokenizer(tmp_path: Path) -> None:
    one = describe_gguf(small_llama().write(tmp_path / "1.gguf"))
    file = small_llama()
    file.keys["tokenizer.ggml.tokens"] = (ARRAY, (STRING, ["a", "b", "d", "c"]))
    two = describe_gguf(file.write(tmp_path / "2.gguf"))
    file = small_llama()
    file.keys["tokenizer.chat_template"] = (STRING, "other")
    three = describe_gguf(file.write(tmp_path / "3.gguf"))
    assert one.tokenizer.digest != two.tokenizer.digest
    assert one.tokenizer.digest == three.tokenizer.digest
    assert len({m.revision_digest for m in (one, two, three)}) == 3


QUICK = ["llama", "qwen3moe", "gemma3", "gpt-oss", "deepseek2", "falcon", "nemotron_h", "lfm2"]
CELL_BYTES = 12  # llama.cpp writes each cell's position and sessions beside it, once a cache


@pytest.mark.parametrize("name", QUICK)
def test_kv_cost_is_what_llama_cpp_stores(name: str, tmp_path: Path) -> None:
    check_kv_cost(name, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", [n for n in SPECS if n not in QUICK])
def test_kv_cost_is_what_llama_cpp_stores_everywhere(name: str, tmp_path: Path) -> None:
    check_kv_cost(name, tmp_path)


def check_kv_cost(name: str, folder: Path) -> None:
    """Bytes of a session in llama.cpp at 4, 12 and 76 tokens; what is written beside the values is a few bytes a cell."""
    path = make_tiny(name, "F16", path=folder / "tiny.gguf")
    model = describe_gguf(path)
    measured: CacheSizes = cache_sizes(path)
    windows = {layer.kv.window_tokens for layer in model.layers if layer.kv.elements_per_token()}
    caches = max(len(windows), 1)
    beside = 2 * CELL_BYTES * caches
    assert 0 <= measured.bytes_per_token_early - model.kv_bytes_per_token() <= beside
    state_bytes = sum(layer.kv.state_bytes for layer in model.layers)
    assert 0 <= measured.constant_bytes - state_bytes <= 120 + 40 * model.num_layers
    grown = kv_bytes(model, 76) - kv_bytes(model, 12)
    assert -1 <= measured.growth_12_to_76_bytes - grown <= 64 * beside + 2 * model.kv_bytes_per_token()


def test_experts_count_once_each(tmp_path: Path) -> None:
    model = describe_gguf(make_tiny("qwen3moe", "Q8_0", path=tmp_path / "m.gguf"))
    layer = model.layers[0]
    spec = layer.experts
    assert spec is not None
    assert (spec.num_experts, spec.num_active, spec.num_shared) == (8, 2, 0)
    routed = [t for t in layer.tensors if "_exps" in t.name]
    assert spec.expert_bytes * 8 == sum(t.num_bytes for t in routed)
    dense = sum(2 * t.num_elements for t in layer.tensors if len(t.shape) == 2)
    assert layer.flops_per_token == dense + sum(2 * t.num_elements for t in routed) / 4
    assert layer.active_weight_bytes(1) == layer.weight_bytes - spec.expert_bytes * 6
    assert active_params(model) < model.num_params


def test_layers_for_multi_token_prediction_are_unused(tmp_path: Path) -> None:
    file = small_llama(3)
    file.keys["llama.nextn_predict_layers"] = (U32, 1)
    model = describe_gguf(file.write(tmp_path / "m.gguf"))
    assert model.num_layers == 2
    assert {t.name.split(".")[1] for t in model.unused} == {"2"}
    assert model.stage_weight_bytes(0, 2) < model.weight_bytes


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        ((U32, 3), [16, 16, None, 16]),
        ((ARRAY, (BOOL, [True, False, True, False])), [16, None, 16, None]),
    ],
)
def test_windows_as_number_and_as_list(pattern: tuple[int, object], windows: list[int | None], tmp_path: Path) -> None:
    keys = llama_keys(4)
    renamed = {key.replace("llama.", "gemma3."): content for key, content in keys.items()}
    renamed["general.architecture"] = (STRING, "gemma3")
    renamed["gemma3.attention.sliding_window"] = (U32, 16)
    renamed["gemma3.attention.sliding_window_pattern"] = pattern
    file = GgufFile(keys=renamed, tensors=llama_tensors(4))
    model = describe_gguf(file.write(tmp_path / "m.gguf"))
    assert [layer.kv.window_tokens for layer in model.layers] == windows
    assert kv_bytes(model, 64) == sum(min(64, w or 64) * 64 for w in windows)


def test_groups_of_equal_layers(sample: ModelDescription) -> None:
    groups = group_layers(sample)
    assert [group.ranges for group in groups] == ["0-29"]


def split_into(folder: Path, count: int, *, skip: int | None = None) -> Path:
    """A small llama in `count` parts, as llama-gguf-split makes them: all metadata in the first."""
    tensors = llama_tensors(4)
    per_part = -(-len(tensors) // count)
    for number in range(count):
        part = tensors[number * per_part : (number + 1) * per_part]
        own = {"split.no": (2, number), "split.count": (2, count), "split.tensors.count": (5, len(tensors))}
        keys = llama_keys(4) | own if number == 0 else own
        if number != skip:
            GgufFile(keys=keys, tensors=part).write(folder / f"m-{number + 1:05d}-of-{count:05d}.gguf")
    return folder / f"m-00001-of-{count:05d}.gguf"


def test_a_split_model_is_the_same_model(tmp_path: Path) -> None:
    whole = describe_gguf(GgufFile(keys=llama_keys(4), tensors=llama_tensors(4)).write(tmp_path / "m.gguf"))
    first = split_into(tmp_path, 3)
    for part in (first, tmp_path / "m-00002-of-00003.gguf"):
        model = describe_gguf(part)
        assert model.weight_bytes == whole.weight_bytes
        assert [layer.flops_per_token for layer in model.layers] == [layer.flops_per_token for layer in whole.layers]
        assert len(model.source.paths) == 3
        assert {t.file_index for t in model.all_tensors()} == {0, 1, 2}
        assert model.tokenizer.digest == whole.tokenizer.digest


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first = split_into(tmp_path, 3, skip=1)
    with pytest.raises(ModelError, match="m-00002-of-00003") as caught:
        describe_gguf(first)
    assert caught.value.exit_code == 2


def test_parts_in_wrong_order_or_twice(tmp_path: Path) -> None:
    split_into(tmp_path, 3)
    second, third = tmp_path / "m-00002-of-00003.gguf", tmp_path / "m-00003-of-00003.gguf"
    third.write_bytes(second.read_bytes())
    with pytest.raises(MalformedModelError, match="not part 3 of 3"):
        describe_gguf(second)


def test_a_part_under_another_name(tmp_path: Path) -> None:
    first = split_into(tmp_path, 3)
    renamed = first.rename(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="has 3 parts, but there are 1"):
        describe_gguf(renamed)


def test_a_name_that_would_steer_the_terminal(tmp_path: Path) -> None:
    file = small_llama()
    file.keys["general.name"] = (STRING, "\x1b[31mred\x1b[0m\nand\tmore")
    model = describe_gguf(file.write(tmp_path / "m.gguf"))
    assert model.name == "[31mred[0m and more"


def test_an_untied_head(tmp_path: Path) -> None:
    file = small_llama()
    file.tensors.append(Tensor("output.weight", (32, 4), 8))
    model = describe_gguf(file.write(tmp_path / "m.gguf"))
    assert not model.tied_embeddings
    assert model.stage_weight_bytes(0, 1) + model.stage_weight_bytes(1, 2) == model.weight_bytes
