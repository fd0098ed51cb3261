"""Presets against published sizes, and names as people write them."""

from __future__ import annotations

import pytest

from shardwise.errors import UnsupportedModelError, UsageError
from shardwise.model.preset_quantization import LABELS, parse_quantization
from shardwise.model.presets import describe_preset, find_preset, presets

# Parameters in billions, from model cards; the presets leave out norms' neighbours (biases), hence 1 %.
PUBLISHED_PARAMS = {
    "llama-2-7b": 6.738,
    "llama-2-70b": 68.98,
    "llama-1-30b": 32.53,
    "llama-3-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "llama-3.1-405b": 405.9,
    "llama-3.2-1b": 1.236,
    "llama-3.2-3b": 3.213,
    "qwen2-7b": 7.616,
    "qwen2.5-14b": 14.77,
    "qwen2.5-72b": 72.71,
    "qwen3-8b": 8.19,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.1,
    "qwen3-next-80b-a3b": 79.7,
    "qwen3.5-27b": 26.9,
    "mistral-7b": 7.242,
    "mixtral-8x7b": 46.70,
    "mixtral-8x22b": 140.6,
    "gemma-7b": 8.538,
    "gemma-2-9b": 9.242,
    "gemma-3-4b": 3.88,
    "gemma-3-27b": 27.0,
    "phi-3-mini": 3.821,
    "phi-4": 14.66,
    "phi-4-mini": 3.836,
    "deepseek-v3": 671.0,
    "deepseek-v2-lite": 15.71,
    "kimi-k2": 1026.0,
    "glm-4-9b": 9.4,
    "glm-5": 744.0,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.8,
    "bloom-176b": 176.2,
    "falcon-40b": 41.84,
    "falcon-180b": 179.5,
    "opt-66b": 65.7,
    "tinyllama-1.1b": 1.1,
    "smollm2-135m": 0.1345,
    "smollm2-1.7b": 1.711,
    "yi-34b": 34.39,
    "minimax-m2": 228.7,
}


@pytest.mark.parametrize("name", PUBLISHED_PARAMS)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert find_preset(name).num_params / 1e9 == pytest.approx(PUBLISHED_PARAMS[name], rel=0.01)


# GiB of weights that llama.cpp prints for published files.
PUBLISHED_GIB = {
    ("llama-2-7b", "Q4_0"): 3.56,
    ("llama-2-7b", "Q4_K_M"): 3.80,
    ("llama-2-7b", "Q5_K_M"): 4.45,
    ("llama-2-7b", "Q6_K"): 5.15,
    ("llama-2-7b", "Q8_0"): 6.67,
    ("llama-2-7b", "F16"): 12.55,
    ("llama-2-70b", "Q4_0"): 36.20,
    ("llama-3-8b", "Q4_K_M"): 4.58,
    ("llama-3-70b", "Q4_K_M"): 39.59,
    ("llama-3.2-3b", "Q4_K_M"): 1.87,
    ("qwen2-7b", "Q5_K_S"): 4.94,
    ("tinyllama-1.1b", "F16"): 2.05,
    ("mixtral-8x7b", "Q4_0"): 24.63,
    ("gpt-oss-20b", "MXFP4"): 11.27,
    ("deepseek-r1", "Q4_K_M"): 376.65,
}


@pytest.mark.parametrize(("name", "label"), PUBLISHED_GIB)
def test_weights_are_as_heavy_as_the_published_files(name: str, label: str) -> None:
    gib = describe_preset(name, label).weight_bytes / 2**30
    assert gib == pytest.approx(PUBLISHED_GIB[name, label], rel=0.004, abs=0.005)


def test_the_preset_of_the_sample_weighs_what_the_sample_weighs() -> None:
    from shardwise.model import describe_gguf, sample_path

    preset, real = describe_preset("smollm2-135m:q4_1"), describe_gguf(sample_path())
    assert preset.weight_bytes == real.weight_bytes
    assert [layer.flops_per_token for layer in preset.layers] == [layer.flops_per_token for layer in real.layers]
    assert [layer.kv for layer in preset.layers] == [layer.kv for layer in real.layers]
    assert (preset.head_bytes, preset.tied_embeddings) == (real.head_bytes, real.tied_embeddings)


NAMES = {
    "BLOOM-176B": "bloom-176b",
    "bloom-176b": "bloom-176b",
    "DeepSeek-R1 671B (37B active)": "deepseek-v3",
    "DeepSeek-R1-Distill-Llama-8B": "llama-3.1-8b",
    "DeepSeek-R1-Distill-Qwen-14B": "qwen2.5-14b",
    "DeepSeek-V3.1 671B (37B active)": "deepseek-v3",
    "GLM-5 (params recalled)": "glm-5",
    "Gemma 3 4B": "gemma-3-4b",
    "gemma3 27b it": "gemma-3-27b",
    "Kimi-K2-Thinking 1T (32B active)": "kimi-k2",
    "LLaMA-1 30B": "llama-1-30b",
    "Llama 1-65B": "llama-1-65b",
    "LLaMA-2 70B": "llama-2-70b",
    "llama2-70b": "llama-2-70b",
    "Llama 2-3B": "open-llama-3b",
    "StableBeluga2": "llama-2-70b",
    "Meta-Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "Llama 3.2 3B": "llama-3.2-3b",
    "Phi-3 mini": "phi-3-mini",
    "Phi-4-mini": "phi-4-mini",
    "QwQ-32B": "qwen2.5-32b",
    "Qwen-2.5-72B": "qwen2.5-72b",
    "Qwen2.5-Coder-32B": "qwen2.5-32b",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen3-235B": "qwen3-235b-a22b",
    "Qwen3-VL-235B-A22B": "qwen3-235b-a22b",
    "Qwen3.8-27B (qwen35)": "qwen3.5-27b",
    "TinyLlama 1.1B 3T": "tinyllama-1.1b",
    "Yi-34B": "yi-34b",
    "gpt-oss-120b (5.1B active)": "gpt-oss-120b",
    "Llama-3.1-70B Q4_K_M": "llama-3.1-70b",
    "llama-3-70b:q4_k_m": "llama-3-70b",
    "Mixtral 8x7B": "mixtral-8x7b",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_as_people_write_them(name: str) -> None:
    assert find_preset(name).name == NAMES[name]


@pytest.mark.parametrize(
    ("name", "layers", "billions"), [("Llama 3-14B", 59, 14), ("Llama 3-45B", 50, 45), ("Llama 3-60B", 68, 60)]
)
def test_an_unlisted_size_is_made_of_its_siblings_layers(name: str, layers: int, billions: float) -> None:
    preset = find_preset(name, estimate_size=True)
    assert (preset.layers, preset.estimated) == (layers, True)
    assert preset.num_params / 1e9 == pytest.approx(billions, rel=0.02)
    assert describe_preset(name, "Q4_K_M", estimate_size=True).num_layers == layers
    with pytest.raises(UsageError, match="no preset of that name"):
        find_preset(name)


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("lama-3-70b", "llama-3-70b"),
        ("qwen3-8", "qwen3-8b"),
        ("mixtrl-8x7b:q4_k_m", "mixtral-8x7b"),
        ("gpt-os-20b", "gpt-oss-20b"),
    ],
)
def test_a_misspelt_name_is_suggested(typed: str, suggested: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_preset(typed)
    assert f"did you mean {suggested}" in caught.value.hint
    assert caught.value.exit_code == 2


def test_a_misspelt_quantization_is_suggested() -> None:
    with pytest.raises(UnsupportedModelError, match="Q4_K_S") as caught:
        describe_preset("llama-3-70b:q4_z")
    assert caught.value.exit_code == 2


QUANTIZATIONS = {
    "Q40 weights, Q80 sync buffer": "Q4_0",
    "Q40/Q80": "Q4_0",
    "Q80 buffer": None,
    "unspecified": None,
    "fp16": "F16",
    "FP32 (sliding-window weights from disk)": "F32",
    "int8 (LLM.int8)": "INT8",
    "8-bit MXFP8": "MXFP8",
    "8-bit (exo README; llama.cpp quant not stated)": "Q8_0",
    "native 4-bit": "Q4_0",
    "GPTQ-Int4": "INT4",
    "UD-IQ1_S": "IQ1_S",
    "Q4_K": "Q4_K_M",
    "Q5_K_S (4.94 GiB)": "Q5_K_S",
    "MXFP4 (11.27 GiB)": "MXFP4",
    "bf16": "BF16",
    "q8_0": "Q8_0",
}


@pytest.mark.parametrize("text", QUANTIZATIONS)
def test_quantizations_as_people_write_them(text: str) -> None:
    assert parse_quantization(text) == QUANTIZATIONS[text]


@pytest.mark.parametrize("name", list(presets()))
def test_every_preset_can_be_described(name: str) -> None:
    """Nothing negative, nothing empty, and smaller quantizations are smaller."""
    sizes = [describe_preset(name, label).weight_bytes for label in ("F32", "F16", "Q8_0", "Q4_K_M", "Q2_K")]
    assert sizes == sorted(sizes, reverse=True)
    model = describe_preset(name)
    assert model.num_layers == presets()[name].layers
    assert all(layer.weight_bytes > 0 and layer.flops_per_token > 0 for layer in model.layers)
    assert model.kv_bytes_per_token() > 0
    experts = [layer.experts for layer in model.layers if layer.experts]
    assert bool(experts) == (presets()[name].experts > 0)


@pytest.mark.parametrize("label", LABELS)
def test_every_quantization_fits_every_shape(label: str) -> None:
    for name in ("llama-3-8b", "gpt-oss-20b", "smollm2-135m", "deepseek-v2-lite", "falcon-7b", "mixtral-8x7b"):
        model = describe_preset(name, label)
        assert model.quantization == label
        bits = 8 * model.weight_bytes / model.num_params
        assert 1.5 < bits < 34


def test_no_two_presets_share_a_name() -> None:
    names = [name for preset in presets().values() for name in (preset.name, *preset.aliases)]
    assert len(names) == len(set(names))
